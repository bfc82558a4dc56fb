"""Bytecode for captured Python files that have none that is valid, so that no rank has to compile them again.

In: the files of a difference. Out: .pyc files in a scratch folder, made by the target's own interpreter; the
target is not touched, as ranks import from it meanwhile. They hold the time and size of the source: sources may be
edited later, and a tree keeps the times of files.
"""

from __future__ import annotations

import json
import os
import stat
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from bootseer.env.inside import HERE, Inside
from bootseer.env.walk import Entry, Walk
from bootseer.errors import EnvError
from bootseer.storage.os_errors import map_os_errors

HEADER_BYTES = 16
LEAST_VERSION = (3, 8)
PROBE_S = 30.0
WAIT_S = 0.2  # between looks whether the compilers are to end
SHARE = 64  # files that a process of its own is worth
_PROBE = (
    "import importlib.util as u, json, sys; print(json.dumps({'tag': sys.implementation.cache_tag or '', "
    "'magic': u.MAGIC_NUMBER.hex(), 'version': sys.version_info[:2]}))"
)
_SCRIPT = os.path.join(os.path.dirname(__file__), "compile_list.py")
_TIMES = struct.Struct("<II")  # of the source: mtime in seconds, size, each modulo 2^32


class Interpreter(NamedTuple):
    """Who is to read the bytecode."""

    path: str
    tag: bytes  # in names of .pyc files
    magic: bytes  # in their headers


class Job(NamedTuple):
    """A file to be compiled."""

    path: bytes  # absolute
    number: int  # NUMBER.pyc in the scratch folder


def find_python(target: str, python: str) -> str:
    """The interpreter that imports from a target: its own, else that of the ranks; "" for none."""
    own = os.path.join(target, "bin", "python")
    return own if os.access(own, os.X_OK) else python


def probe(python: str, inside: Inside = HERE) -> Interpreter | None:
    """What its bytecode looks like; None where it cannot be asked, or keeps none."""
    try:
        said = output_of([python, "-I", "-S", "-c", _PROBE], inside.environ(os.environ), inside, PROBE_S)
        told = json.loads(said[:4096])
        if tuple(told["version"]) < LEAST_VERSION or not told["tag"]:
            return None
        return Interpreter(python, str(told["tag"]).encode(), bytes.fromhex(told["magic"]))
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return None


def output_of(words: Sequence[str], environ: Mapping[str, str], inside: Inside, limit_s: float) -> bytes:
    """What a program says that reads nothing. Raises: OSError, subprocess.SubprocessError, also when it fails."""
    return subprocess.run(
        inside.words(words),
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        timeout=limit_s,
        check=True,
    ).stdout


def sources_of(changed: Sequence[bytes], after: Walk) -> list[bytes]:
    """PURE: the files that are imported by name. Programs are not: what is in `bin` has no bytecode."""
    return [
        path
        for path in changed
        if path.endswith(b".py") and stat.S_ISREG(after[path].mode) and not path.startswith((b"bin/", b"Scripts/"))
    ]


def bytecode_path(source: bytes, tag: bytes) -> bytes:
    """PURE: where Python looks for it."""
    above, _, name = source.rpartition(b"/")
    return (above + b"/" if above else b"") + b"__pycache__/" + name[:-3] + b"." + tag + b".pyc"


def is_valid(header: bytes, magic: bytes, source: Entry) -> bool:
    """PURE: whether a .pyc that begins so is believed, for this source. Python checks those with a hash."""
    if len(header) < HEADER_BYTES or header[:4] != magic:
        return False
    flags = int.from_bytes(header[4:8], "little")
    if flags:
        return flags in (0b01, 0b11)
    return header[8:16] == _TIMES.pack(source.mtime_ns // 10**9 & 0xFFFFFFFF, source.size & 0xFFFFFFFF)


def compile_all(
    jobs: Sequence[Job],
    interpreter: Interpreter,
    scratch: str,
    *,
    workers: int,
    on_wait: Callable[[], object],
    inside: Inside = HERE,
    in_place: bool = False,
) -> None:
    """Compiles what compiles; who called looks at what there is.

    Args: in_place: to where Python looks for it, not into the scratch folder. on_wait: called now and then; what
        it raises ends the compilers.

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
            if process.poll() is None:
                process.kill()
                process.wait()


def _start(
    interpreter: Interpreter, scratch: str, stdin: int, inside: Inside, *, in_place: bool
) -> subprocess.Popen[bytes]:
    # Always the same order in the constants of sets: the same sources give the same tree.
    environ = {"PYTHONHASHSEED": "0"} | _kept(inside.environ(os.environ))
    program = [_SCRIPT]
    if inside.prefix:  # where the file is not seen
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
        raise EnvError(f"{interpreter.path}: {error.strerror}: nothing can be compiled by it") from error


def _kept(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: environ[name] for name in ("LD_LIBRARY_PATH", "PATH") if name in environ}
