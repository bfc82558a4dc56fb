"""Brings mounts out of another mount namespace, as descriptors that can be attached in a third one.

A copy of a mount can be made only by a process that is in the mount's own namespace; so a child goes there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Sequence

from bootseer.errors import BootseerError, StorageError
from bootseer.mounts import enter, namespaces

ASK_S = 30.0
_NEWNS = 0x00020000
_MOST_FOLDERS = 250  # descriptors that go through a socket in one message


def carry_mounts(door: str, folders: Sequence[str]) -> list[tuple[str, int]]:
    """Copies of what is mounted at these folders where a door leads (enter.ask): with descriptors, to be closed.

    Raises: StorageError, ConfigError.
    """
    if len(folders) > _MOST_FOLDERS:
        raise StorageError(f"{len(folders)} folders are mounted: at most {_MOST_FOLDERS} can be shown in an image")
    try:
        _, found = enter.ask(door)
    except (enter.CannotEnterError, OSError) as error:
        raise StorageError(f"the environment is not seen in the image: {error}") from error
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    pid = 0
    try:
        pid = os.fork()
        if pid == 0:
            _carry(theirs, found, folders)
        theirs.close()
        ours.settimeout(ASK_S)
        said, fds, _, _ = socket.recv_fds(ours, 1 << 16, len(folders))
    except OSError as error:
        raise StorageError(f"the environment is not seen in the image: {error}") from error
    finally:
        ours.close()
        theirs.close()
        if pid:
            os.kill(pid, signal.SIGKILL)  # it has said all, or hangs
            os.waitpid(pid, 0)
        for fd in found:
            os.close(fd)
    if len(fds) != len(folders):
        for fd in fds:
            os.close(fd)
        why = said.decode(errors="replace") or "no answer"
        raise StorageError(f"the environment is not seen in the image: {why}")
    return list(zip(folders, fds, strict=True))


def _carry(connection: socket.socket, found: Sequence[int], folders: Sequence[str]) -> None:
    """The child. Never returns."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(found[0], _NEWNS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        os.fchdir(found[1])
        os.chroot(".")
        fds = [namespaces.copy_mount(folder) for folder in folders]
        socket.send_fds(connection, [b"."], fds)
    except (OSError, BootseerError) as error:
        try:
            connection.sendall(str(error).encode("utf-8", "backslashreplace")[: 1 << 15])
        except OSError:
            pass  # the parent has gone
    finally:
        os._exit(0)
