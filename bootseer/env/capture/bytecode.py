"""Bytecode for captured Python files without valid bytecode, so that no rank has to compile them again.

In: the files of a difference. Out: .pyc files in a scratch directory, made by the target's own interpreter. The
target is not changed, as ranks import from it meanwhile. The .pyc files contain the time and size of the source:
sources may be edited later, and a tree keeps the times of files.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bootseer.env.capture.walk import Entry, Walk
from bootseer.env.exec_place import HERE, ExecPlace
from bootseer.errors import EnvError
from bootseer.linux.child_processes import end_process, run_limited
from bootseer.storage.os_errors import map_os_errors

HEADER_BYTES = 16
MIN_VERSION = (3, 8)
PROBE_S = 30.0
WAIT_S = 0.2  # between calls of `on_wait`
SHARE = 64  # files for each process
_PROBE = (
    "import importlib.util as u, json, sys; print(json.dumps({'tag': sys.implementation.cache_tag or '', "
    "'magic': u.MAGIC_NUMBER.hex(), 'version': sys.version_info[:2]}))"
)
_SCRIPT = os.path.join(os.path.dirname(__file__), "compile_list.py")
_TIMES = struct.Struct("<II")  # of the source: mtime in seconds, size, each modulo 2^32


class BytecodeFormat(NamedTuple):
    """The interpreter that reads the bytecode."""

    path: str
    tag: bytes  # in names of .pyc files
    magic: bytes  # in their headers


class CompileJob(NamedTuple):
    path: bytes  # absolute
    number: int  # NUMBER.pyc in the scratch directory


def find_python(target: str, python: str) -> str:
    """Return the interpreter that imports from a target: its own, else that of the ranks; "" for none."""
    own = os.path.join(target, "bin", "python")
    return own if os.access(own, os.X_OK) else python


def python_of(targets: Sequence[str], seen_by: int = 0) -> str:
    """Return the interpreter that set-up has created in a target, by its path in the image; "" for none.

    Args: seen_by: pid of a process that sees the targets; 0: this one does.
    """
    root = f"/proc/{seen_by}/root" if seen_by else ""
    for target in targets:
        python = os.path.join(target, "bin", "python")
        # Its link may lead to a file that only the image has.
        if os.path.isfile(f"{root}{target}/pyvenv.cfg") and os.path.lexists(root + python):
            return python
    return ""


def probe(python: str, inside: ExecPlace = HERE) -> BytecodeFormat | None:
    """Return the bytecode format of an interpreter; None if it cannot be queried or writes no bytecode."""
    try:
        said = output_of([python, "-I", "-S", "-c", _PROBE], inside.environ(os.environ), inside, PROBE_S)
        told = json.loads(said[:4096])
        if tuple(told["version"]) < MIN_VERSION or not told["tag"]:
            return None
        return BytecodeFormat(python, str(told["tag"]).encode(), bytes.fromhex(told["magic"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def output_of(words: Sequence[str], environ: Mapping[str, str], inside: ExecPlace, limit_s: float) -> bytes:
    """Return the output of a program without input. Raises: OSError, subprocess.SubprocessError."""
    done = run_limited(inside.words(words), timeout_s=limit_s, environ=environ, cwd="/")
    done.check_returncode()
    return done.stdout


def sources_of(changed: Sequence[bytes], after: Walk) -> list[bytes]:
    """PURE: return the files that are imported by name. Programs in `bin` are not, so they have no bytecode."""
    return [
        path
        for path in changed
        if path.endswith(b".py") and stat.S_ISREG(after[path].mode) and not path.startswith((b"bin/", b"Scripts/"))
    ]


def bytecode_path(source: bytes, tag: bytes) -> bytes:
    """PURE: return the path where Python expects the bytecode of a source."""
    above, _, name = source.rpartition(b"/")
    return (above + b"/" if above else b"") + b"__pycache__/" + name[:-3] + b"." + tag + b".pyc"


def is_valid(header: bytes, magic: bytes, source: Entry) -> bool:
    """PURE: return whether a .pyc with this header is valid for a source. Python checks those with a hash."""
    if len(header) < HEADER_BYTES or header[:4] != magic:
        return False
    flags = int.from_bytes(header[4:8], "little")
    if flags:
        return flags in (0b01, 0b11)
    return header[8:16] == _TIMES.pack(source.mtime_ns // 10**9 & 0xFFFFFFFF, source.size & 0xFFFFFFFF)


def compile_all(
    jobs: Sequence[CompileJob],
    interpreter: BytecodeFormat,
    scratch: str,
    *,
    workers: int,
    on_wait: Callable[[], object],
    inside: ExecPlace = HERE,
    in_place: bool = False,
) -> None:
    """Compile all files that compile; the caller finds the results in the scratch directory.

    Args: in_place: write to the path where Python expects it, not to the scratch directory. on_wait: called
        regularly; an exception that it raises ends the compilers.

    Raises: EnvError, StorageError.
    """
    count = max(1, min(workers, len(jobs) // SHARE))
    running: list[subprocess.Popen[bytes]] = []
    try:
        for worker in range(count):
            items = b"".join(b"%d\0%s\0" % (job.number, job.path) for job in jobs[worker::count])
            with map_os_errors(scratch), open(os.path.join(scratch, f"list-{worker}"), "w+b") as file:
                file.write(items)
                file.seek(0)
                running.append(_start(interpreter, scratch, file.fileno(), inside, in_place=in_place))
        for process in running:
            while True:
                try:
                    process.wait(WAIT_S)
                    break
                except subprocess.TimeoutExpired:
                    on_wait()
    finally:
        for process in running:
            end_process(process)


def _start(
    interpreter: BytecodeFormat, scratch: str, stdin: int, inside: ExecPlace, *, in_place: bool
) -> subprocess.Popen[bytes]:
    # A fixed hash seed fixes the order of set constants: the same sources give the same tree.
    environ = {"PYTHONHASHSEED": "0"} | _kept(inside.environ(os.environ))
    program = [_SCRIPT]
    if inside.prefix:  # the sandbox does not see the file
        with open(_SCRIPT, encoding="utf-8") as file:
            program = ["-c", file.read()]
    try:
        return subprocess.Popen(
            inside.words(
                [interpreter.path, "-s", "-S", "-B", "-X", "utf8", *program, "" if in_place else scratch]
            ),
            stdin=stdin,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=scratch,
            env=environ,
        )
    except OSError as error:
        raise EnvError(f"{interpreter.path}: cannot compile: {error.strerror}") from error


def _kept(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in environ}
