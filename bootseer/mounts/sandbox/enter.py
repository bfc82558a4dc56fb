"""Enters an image and becomes a program there: `python -I -S enter.py ADDRESS PROGRAM ARGS...`

Run by path, by the node's interpreter; stdlib only, as it is a part of every start. In: the abstract socket of the
image's sandbox process (process.py), which sends descriptors of its namespaces and the variables of the loader.
The program gets this process: its pid, session, descriptors, signals, environment and working directory, but no
new privileges. After `enter` no module can be imported: the node's files are out of reach.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # module signal takes 4 ms
import _socket
import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

MAX_FRAME_BYTES = 1 << 20
MAX_FDS = 3  # mount namespace, root directory, user namespace
NEEDS_USER, NO_USER = b"user", b""
CANNOT_ENTER, NO_PROGRAM = 126, 127  # exit statuses, as in shells
PATIENCE_S = 30
_CLONE_NEWNS, _CLONE_NEWUSER = 0x00020000, 0x10000000
_SET_PDEATHSIG, _GET_PDEATHSIG, _SET_NO_NEW_PRIVS, _CAP_AMBIENT, _CLEAR_ALL = 1, 2, 38, 47, 4
_DEFAULT_PATH = b"/usr/local/bin:/usr/bin:/bin"
_KILL = 9


class CannotEnterError(Exception):
    """One line for users."""


def main(argv: Sequence[str]) -> NoReturn:
    """Become argv[2:] in the image at argv[1]."""
    # Undo the interpreter's changes of signals: programs expect the defaults.
    for number in (_signal.SIGPIPE, _signal.SIGXFSZ, _signal.SIGINT):
        if _signal.getsignal(number) != _signal.SIG_IGN or number != _signal.SIGINT:
            _signal.signal(number, _signal.SIG_DFL)
    status = CANNOT_ENTER
    try:
        environ = read_environ()
        folder = os.getcwd()
        loader, fds = ask(argv[1])
        enter(fds, folder)
        for name, value in loader.items():
            environ.pop(name, None)
            if value is not None:
                environ[name] = value
        status = NO_PROGRAM
        become([os.fsencode(word) for word in argv[2:]], environ)
    except CannotEnterError as error:
        text = f"bootseer: {error}\n"
    except OSError as error:
        text = f"bootseer: cannot enter the image: {error}\n"
    try:
        os.write(2, text.encode("utf-8", "backslashreplace"))
    except OSError:
        pass  # stderr has no reader
    os._exit(status)


def read_environ() -> dict[bytes, bytes]:
    """Return the environment that this process was given; the interpreter may have added a locale to its copy."""
    try:
        with open("/proc/self/environ", "rb", 0) as file:
            data = file.readall()
    except OSError:
        return dict(os.environb)
    pairs = [each.partition(b"=") for each in data.split(b"\0")]
    return {name: value for name, equals, value in pairs if equals}


def ask(address: str) -> tuple[dict[bytes, bytes | None], list[int]]:
    """Return what the sandbox process sends: variables of the loader (None: unset inside), and descriptors."""
    try:
        holder = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM | _socket.SOCK_CLOEXEC)
        try:
            holder.settimeout(PATIENCE_S)
            holder.connect(b"\0" + os.fsencode(address))
            check_peer(holder)
            data, fds = _receive(holder)
        finally:
            holder.close()
    except (OSError, ValueError) as error:
        raise CannotEnterError(f"the image's sandbox process does not answer: {error}") from None
    kind, *pairs = data.split(b"\0")
    if len(fds) != (3 if kind == NEEDS_USER else 2):
        raise CannotEnterError("the image's sandbox process sent no descriptors")
    loader: dict[bytes, bytes | None] = {}
    for each in pairs:
        name, equals, value = each.partition(b"=")
        loader[name] = value if equals else None
    return loader, fds


def check_peer(connection: _socket.socket) -> None:
    """Raise OSError unless the other end is this user's, or root's."""
    found = connection.getsockopt(_socket.SOL_SOCKET, _socket.SO_PEERCRED, 12)
    uid = int.from_bytes(found[4:8], sys.byteorder)
    if uid not in (0, os.geteuid()):
        raise PermissionError(1, f"user {uid} answers")


def _receive(holder: _socket.socket) -> tuple[bytes, list[int]]:
    data, fds = b"", []
    size = 4
    while len(data) < size:
        part, more, _, _ = holder.recvmsg(1 << 16, _socket.CMSG_SPACE(4 * MAX_FDS), _socket.MSG_CMSG_CLOEXEC)
        for level, kind, packed in more:
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS):
                fds += [
                    int.from_bytes(packed[at : at + 4], sys.byteorder) for at in range(0, len(packed) // 4 * 4, 4)
                ]
        if not part:
            raise OSError("it has closed its connection")
        data += part
        if len(data) >= 4:
            size = 4 + int.from_bytes(data[:4], "little")
            if size > MAX_FRAME_BYTES:
                raise OSError("it sent an invalid message")
    return data[4:size], fds


def enter(fds: Sequence[int], folder: str) -> None:
    """Make the image the root of this process, and `folder` its working directory.

    Args: fds: of the mount namespace, its root directory and, for an unprivileged process, the user namespace.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    death = ctypes.c_int(0)
    libc.prctl(_GET_PDEATHSIG, ctypes.byref(death), 0, 0, 0)
    parent = os.getppid()
    for which, kind in ((fds[2:], _CLONE_NEWUSER), (fds[:1], _CLONE_NEWNS)):
        if which and libc.setns(which[0], kind):
            number = ctypes.get_errno()
            raise CannotEnterError(f"cannot enter the image's namespace: {os.strerror(number).lower()}")
    os.fchdir(fds[1])
    os.chroot(".")
    for fd in fds:
        os.close(fd)
    libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if os.geteuid():
        libc.prctl(_CAP_AMBIENT, _CLEAR_ALL, 0, 0, 0)  # the exec drops the others
    # Set by the starter of this program; a change of privileges clears it.
    if death.value:
        libc.prctl(_SET_PDEATHSIG, death.value, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(128 + _KILL)
    try:
        os.chdir(folder)
    except OSError as error:
        raise CannotEnterError(
            f"the working directory {folder} cannot be entered inside the image"
            f" ({(error.strerror or '').lower()}): start from another directory, or pass --image-bind {folder}"
        ) from None


def become(words: list[bytes], environ: Mapping[bytes, bytes]) -> NoReturn:
    """Replace this process by a program of the image."""
    program = words[0]
    places = [program]
    if b"/" not in program:
        path = environ.get(b"PATH", _DEFAULT_PATH)
        places = [(folder or b".") + b"/" + program for folder in path.split(b":")]
    found: OSError | None = None
    for place in places:
        try:
            os.execve(place, words, environ)
        except FileNotFoundError as error:
            found = found or error
        except OSError as error:
            if found is None or isinstance(found, FileNotFoundError):
                found = error
    shown = os.fsdecode(program)
    reason = ((found.strerror if found else "") or "not found").lower()
    if isinstance(found, FileNotFoundError) and any(os.path.lexists(place) for place in places):
        reason = "its interpreter or loader does not exist"
    raise CannotEnterError(f"cannot start {shown} inside the image: {reason}")


if __name__ == "__main__":
    main(sys.argv)
