"""The base of set-up: the ranks' interpreter and the packages installed for it, or an image.

base_probe.py queries the interpreter itself, in a child process. Its answer is bounded and checked. It is split in
two parts: packages outside the targets, and packages in one (`target:...`), which set-up itself changes.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence

import msgspec

from bootseer.env.key.document import to_utf8_text
from bootseer.env.parse.redaction import is_secret_name
from bootseer.errors import ConfigError, KeyUnknown, LaunchError
from bootseer.linux.child_processes import end_process

PROBE_TIMEOUT_S = 30.0
MAX_ANSWER_BYTES = 16 << 20
IN_TARGET = "target:"

_PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "base_probe.py")
_INTERPRETER = ("version", "implementation", "build", "abi", "platform", "purelib", "platlib", "scripts")


class PathEntry(msgspec.Struct, frozen=True):
    """A directory of sys.path, resolved."""

    folder: str
    distributions: list[tuple[str, str, str]]  # name, version, SHA-256 of RECORD
    added: list[str]  # directories that its .pth files add to the path


class Interpreter(msgspec.Struct, frozen=True):
    """An interpreter, as base_probe.py describes it."""

    version: str
    implementation: str
    build: str
    abi: str
    platform: str
    libc: str
    arch: str
    prefix: str  # resolved, like the next
    base_prefix: str
    is_venv: bool
    is_conda: bool
    purelib: str
    platlib: str
    scripts: str
    folders: list[PathEntry]
    conda: list[tuple[str, str]]  # name, "version build"


def probe_interpreter(python: str, environ: Mapping[str, str], cwd: str) -> Interpreter:
    """Run an interpreter once, for some hundredths of a second, and return its description.

    Raises: ConfigError if it cannot be run, KeyUnknown if its answer is invalid, LaunchError without an answer.
    """
    own = {name: value for name, value in environ.items() if not is_secret_name(name)}
    own["PYTHONDONTWRITEBYTECODE"] = "1"  # the probe must not change the files that are compared
    nonce = os.urandom(8).hex()
    mark = f"\nbootseer-base {nonce} ".encode()
    try:
        output, status = _run([python, _PROBE, nonce], own, cwd, mark)
    except OSError as error:
        raise ConfigError(
            f"{python}: cannot be run in {cwd}: {error.strerror}; name the ranks' interpreter"
        ) from error
    line, end, _ = output.rpartition(mark)[2].partition(b"\n")
    if mark not in output or not end:
        last = output.decode("utf-8", "replace").strip().rpartition("\n")[2]
        shown = "".join(letter if letter.isprintable() else "?" for letter in last[:200])
        raise KeyUnknown(
            f"{python}: did not report what is installed (exit status {status}): {shown or 'it wrote nothing'}"
        )
    try:
        return msgspec.json.decode(line, type=Interpreter)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise KeyUnknown(f"{python}: invalid report of what is installed: {error}") from error


def _run(words: Sequence[str], environ: Mapping[str, str], cwd: str, mark: bytes) -> tuple[bytes, int]:
    """Return stdout and stderr up to the answer, and the exit status. A grandchild may keep the pipe open."""
    deadline_s = time.monotonic() + PROBE_TIMEOUT_S
    output = bytearray()
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environ, cwd=cwd
    )
    assert process.stdout is not None
    try:
        fd = process.stdout.fileno()
        os.set_blocking(fd, False)
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        while len(output) <= MAX_ANSWER_BYTES:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise LaunchError(
                    f"{words[0]}: did not report within {PROBE_TIMEOUT_S:g} s what is installed; does its "
                    "start-up code (.pth, sitecustomize) or its file system hang?"
                )
            if not poll.poll(left_s * 1000):
                continue
            try:
                data = os.read(fd, 1 << 20)
            except BlockingIOError:
                continue
            output += data
            begin = output.rfind(mark) if b"\n" in data else -1
            if not data or (begin >= 0 and output.find(b"\n", begin + len(mark)) >= 0):
                try:
                    return bytes(output), process.wait(max(0.0, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    return bytes(output), -1
        raise KeyUnknown(f"{words[0]}: writes more than {MAX_ANSWER_BYTES} bytes at its start")
    finally:
        process.stdout.close()
        end_process(process)


def of_image(digest: str, venv_of: str = "", states: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the base of set-up in an image.

    Args: venv_of: set-up starts with a virtual environment of this interpreter. states: `in_place.state_of`
        of each target that is not empty.
    """
    base = {"kind": "image", "image": digest} | ({"venv_of": venv_of} if venv_of else {})
    return base | {to_utf8_text(f"{IN_TARGET}{target}"): state for target, state in (states or {}).items()}


def of_node() -> dict[str, str]:
    """Return the base where there is no interpreter, or none yet."""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = "other"
    return {"kind": "none", "arch": os.uname().machine, "libc": libc}


def of_interpreter(found: Interpreter, python: str, targets: Sequence[str]) -> dict[str, str]:
    """Return the base of an interpreter. `targets`: resolved.

    Where the interpreter itself lies in a target (conda), set-up may replace it: then it is part of the target.
    """
    own = IN_TARGET if is_below(os.path.realpath(python), targets) else ""
    base = {"kind": "python", "arch": found.arch, "libc": found.libc}
    base |= {"prefix": found.prefix, own + "base_prefix": found.base_prefix, "is_venv": str(found.is_venv).lower()}
    base |= {own + name: getattr(found, name) for name in _INTERPRETER}
    ours = {path for each in found.folders if is_below(each.folder, targets) for path in each.added}
    for each in found.folders:
        # Set-up has made the directories that a .pth file in a target adds to the path.
        where = IN_TARGET if is_below(each.folder, targets) or each.folder in ours else ""
        for name, version, digest in each.distributions:
            # The first of a name counts, as for imports. But one in a target hides none outside: it would change
            # the base of its own set-up.
            base.setdefault(f"{where}dist:{name}", f"{version} {digest}".strip())
    where = IN_TARGET if is_below(found.prefix, targets) else ""
    base |= {f"{where}conda:{name}": text for name, text in found.conda}
    return {to_utf8_text(name): to_utf8_text(value) for name, value in base.items()}


def with_known(fresh: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """Return the base before set-up, of a target that is set up already and unchanged since.

    `known`: the base when it was set up. Only its target part is used: packages outside may have changed, and then
    the key must change.
    """
    if known.get("kind") == "none" and fresh.get("kind") != "image":
        return of_node()
    if known.get("kind") != fresh.get("kind"):
        return dict(fresh)
    outside = {name: value for name, value in fresh.items() if not name.startswith(IN_TARGET)}
    return outside | {name: value for name, value in known.items() if name.startswith(IN_TARGET)}


def markers(found: Interpreter) -> dict[str, str]:
    """Return the values of PEP 508 markers that are known of another interpreter."""
    is_cpython = found.implementation == "cpython"
    return {
        "python_version": ".".join(found.version.split(".")[:2]),
        "python_full_version": found.version.rstrip("+"),
        "implementation_name": found.implementation,
        "platform_python_implementation": "CPython" if is_cpython else found.implementation,
        "platform_machine": found.arch,
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
    }


def is_below(path: str, directories: Sequence[str]) -> bool:
    """Return whether a path is one of these directories, or lies below one."""
    return any(path == directory or path.startswith(directory.rstrip("/") + "/") for directory in directories)
