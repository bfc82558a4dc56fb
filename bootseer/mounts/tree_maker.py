"""A process that makes the metadata of a tree while its daemon checks the index: both take most of a first start.

In: the index object as it is stored. Out: what `erofs.metadata` makes of it. What comes of an index that does not
stand the check is thrown away, and so nothing is shown to the kernel that was not checked. It is forked before the
daemon has threads or an order, and waits; without it, or when it fails, the daemon does the work itself.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from typing import NoReturn

from bootseer.mounts.namespaces import die_with_parent
from bootseer.tree import erofs
from bootseer.tree.index import read_unchecked

DONE = b"+"
_HEAD_BYTES = 64  # the digest, hex


class Maker:
    """The daemon's end. `begin`, then `finish`; `close` in any case. For one thread at a time."""

    def __init__(self, connection: socket.socket | None, pid: int = 0) -> None:
        """`connection`: None of one that could not be started, and so makes nothing."""
        self._connection, self._pid = connection, pid
        self._is_asked = False

    def begin(self, index_bytes: bytes, digest: str) -> None:
        """Gives it an index object with this digest. What goes wrong is seen in `finish`."""
        if self._connection is None:
            return
        try:
            fd = os.memfd_create("index", os.MFD_CLOEXEC)
            try:
                with open(fd, "wb", buffering=0, closefd=False) as file:
                    file.write(index_bytes)
                socket.send_fds(self._connection, [digest.encode()], [fd])
            finally:
                os.close(fd)
            self._is_asked = True
        except OSError:
            pass

    def finish(self) -> bytearray | None:
        """The metadata; None when it has failed. Blocks. Ends it."""
        data: bytearray | None = None
        try:
            if self._connection is not None and self._is_asked:
                said, fds, _, _ = socket.recv_fds(self._connection, len(DONE), 1)
                if fds:
                    with open(fds[0], "rb", buffering=0) as file:
                        found = bytearray(os.fstat(fds[0]).st_size)
                        file.seek(0)  # the maker's end is ours: it has written
                        if said == DONE and file.readinto(found) == len(found) > 0:
                            data = found
        except (OSError, MemoryError):
            data = None
        self.close()
        return data

    def close(self) -> None:
        """Ends it, whatever it does."""
        if self._connection is not None:
            self._connection.close()
        pid, self._pid = self._pid, 0
        if pid:
            os.kill(pid, signal.SIGKILL)  # it has not been waited for, so the pid is its own
            os.waitpid(pid, 0)


_waiting: list[Maker] = []  # at most one


def start() -> None:
    """Forks it; to be called before this process has threads. Never fails."""
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        parent = os.getpid()
        pid = os.fork()
    except OSError:
        return
    if not pid:
        _be_maker(theirs, parent)
    theirs.close()
    _waiting.append(Maker(ours, pid))


def take() -> Maker:
    """The one that was started, the caller's then; else one that makes nothing."""
    return _waiting.pop() if _waiting else Maker(None)


def _be_maker(connection: socket.socket, parent: int) -> NoReturn:
    status = 1
    try:
        die_with_parent(signal.SIGKILL)
        if os.getppid() == parent:
            _close_others({0, 1, 2, connection.fileno()})
            _make(connection)
            status = 0
    except (OSError, MemoryError):
        pass  # the daemon does it itself
    finally:
        os._exit(status)


def _make(connection: socket.socket) -> None:
    digest, fds, _, _ = socket.recv_fds(connection, _HEAD_BYTES, 1)
    if not fds:
        return  # it is not needed
    gc.disable()
    with open(fds[0], "rb", buffering=0) as file:
        index_bytes = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    data = erofs.metadata(read_unchecked(index_bytes, digest.decode(), "the index"), digest.decode())
    fd = os.memfd_create("metadata", os.MFD_CLOEXEC)
    with open(fd, "wb", buffering=0) as file:
        if file.write(data) == len(data):
            socket.send_fds(connection, [DONE], [fd])


def _close_others(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            try:
                os.close(int(name))
            except OSError:
                pass  # the one that listed the folder
