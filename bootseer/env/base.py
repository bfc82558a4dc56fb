"""What set-up starts from: the ranks' interpreter and what is installed for it, or an image.

The interpreter itself is asked, in a child process, by base_probe.py. Its answer is bounded, checked, and put into
two parts: what lies outside the targets, and what lies in one (`target:...`), which set-up itself changes.
"""

from __future__ import annotations

import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence

import msgspec

from bootseer.env.document import plain
from bootseer.env.redaction import is_secret_name
from bootseer.errors import ConfigError, KeyUnknown, LaunchError

PATIENCE_S = 30.0
MOST_ANSWER_BYTES = 16 << 20
IN_TARGET = "target:"

_PROBE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "base_probe.py")
_INTERPRETER = ("version", "implementation", "build", "abi", "platform", "purelib", "platlib", "scripts")


class Folder(msgspec.Struct, frozen=True):
    """A folder of sys.path, resolved."""

    folder: str
    distributions: list[tuple[str, str, str]]  # name, version, SHA-256 of RECORD
    added: list[str]  # folders that its .pth files put on the path


class Interpreter(msgspec.Struct, frozen=True):
    """An interpreter, as base_probe.py describes it."""

    version: str
    implementation: str
    build: str
    abi: str
    platform: str
    libc: str
    arch: str
    prefix: str  # resolved, as is the next
    base_prefix: str
    is_venv: bool
    is_conda: bool
    purelib: str
    platlib: str
    scripts: str
    folders: list[Folder]
    conda: list[tuple[str, str]]  # name, "version build"


def ask_interpreter(python: str, environ: Mapping[str, str], cwd: str) -> Interpreter:
    """Runs it once, for some hundredths of a second.

    Raises: ConfigError when it cannot be run, KeyUnknown when it answers nonsense; LaunchError when it does
        not answer.
    """
    own = {name: value for name, value in environ.items() if not is_secret_name(name)}
    own["PYTHONDONTWRITEBYTECODE"] = "1"  # it must not change what is about to be compared
    nonce = os.urandom(8).hex()
    mark = f"\nbootseer-base {nonce} ".encode()
    try:
        output, status = _run([python, _PROBE, nonce], own, cwd, mark)
    except OSError as error:
        raise ConfigError(
            f"{python}: cannot be run in {cwd}: {error.strerror}: name the ranks' interpreter"
        ) from error
    line, end, _ = output.rpartition(mark)[2].partition(b"\n")
    if mark not in output or not end:
        last = output.decode("utf-8", "replace").strip().rpartition("\n")[2]
        shown = "".join(letter if letter.isprintable() else "?" for letter in last[:200])
        raise KeyUnknown(
            f"{python}: does not say what is installed (exit status {status}): {shown or 'it wrote nothing'}"
        )
    try:
        return msgspec.json.decode(line, type=Interpreter)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise KeyUnknown(f"{python}: its answer about what is installed is not understood: {error}") from error


def _run(words: Sequence[str], environ: Mapping[str, str], cwd: str, mark: bytes) -> tuple[bytes, int]:
    """Output with errors, up to its answer, and the exit status. A child of its own may keep the pipe open."""
    deadline_s = time.monotonic() + PATIENCE_S
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
        while len(output) <= MOST_ANSWER_BYTES:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise LaunchError(
                    f"{words[0]}: did not say within {PATIENCE_S:g} s what is installed: does its start-up code "
                    "(.pth, sitecustomize) or its file system hang?"
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
        raise KeyUnknown(f"{words[0]}: writes more than {MOST_ANSWER_BYTES} bytes when it starts")
    finally:
        process.stdout.close()
        if process.poll() is None:
            process.kill()
        process.wait()


def of_image(digest: str, venv_of: str = "", states: Mapping[str, str] | None = None) -> dict[str, str]:
    """The base of set-up in an image.

    Args: venv_of: set-up begins with a virtual environment of this interpreter. states: of targets that are not
        empty, `restore_there.state_of` each.
    """
    base = {"kind": "image", "image": digest} | ({"venv_of": venv_of} if venv_of else {})
    return base | {plain(f"{IN_TARGET}{target}"): state for target, state in (states or {}).items()}


def of_node() -> dict[str, str]:
    """The base where there is no interpreter, or none yet."""
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        libc = "other"
    return {"kind": "none", "arch": os.uname().machine, "libc": libc}


def of_interpreter(found: Interpreter, python: str, targets: Sequence[str]) -> dict[str, str]:
    """The base of an interpreter. `targets`: resolved.

    Where the interpreter itself lies in a target (conda), set-up may replace it: then it counts as the target's.
    """
    own = IN_TARGET if is_below(os.path.realpath(python), targets) else ""
    base = {"kind": "python", "arch": found.arch, "libc": found.libc}
    base |= {"prefix": found.prefix, own + "base_prefix": found.base_prefix, "is_venv": str(found.is_venv).lower()}
    base |= {own + name: getattr(found, name) for name in _INTERPRETER}
    ours = {path for each in found.folders if is_below(each.folder, targets) for path in each.added}
    for each in found.folders:
        # What a .pth file in a target adds to the path has come with set-up.
        where = IN_TARGET if is_below(each.folder, targets) or each.folder in ours else ""
        for name, version, digest in each.distributions:
            # The first of a name counts, as for imports; but one in a target hides none outside: it would
            # change the base of its own set-up.
            base.setdefault(f"{where}dist:{name}", f"{version} {digest}".strip())
    where = IN_TARGET if is_below(found.prefix, targets) else ""
    base |= {f"{where}conda:{name}": text for name, text in found.conda}
    return {plain(name): plain(value) for name, value in base.items()}


def with_known(fresh: Mapping[str, str], known: Mapping[str, str]) -> dict[str, str]:
    """The base before set-up, of a target which is set up already and unchanged since.

    `known`: the base when it was set up. Of that only the target's own part is taken: what lies outside may have
    changed, and then the key has to change.
    """
    if known.get("kind") == "none" and fresh.get("kind") != "image":
        return of_node()
    if known.get("kind") != fresh.get("kind"):
        return dict(fresh)
    outside = {name: value for name, value in fresh.items() if not name.startswith(IN_TARGET)}
    return outside | {name: value for name, value in known.items() if name.startswith(IN_TARGET)}


def markers(found: Interpreter) -> dict[str, str]:
    """What PEP 508's markers ask for, as far as it is known of another interpreter."""
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


def is_below(path: str, folders: Sequence[str]) -> bool:
    """Whether it is one of them, or lies below one."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)
