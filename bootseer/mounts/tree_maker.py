"""A process that makes the metadata of a tree while its daemon checks the index: both take most of a first start.

In: the index object as it is stored. Out: what `erofs.metadata` makes of it. What comes of an index that does not
stand the check is thrown away, and so nothing is shown to the kernel that was not checked. It is forked before the
daemon has threads or an order, and waits; without it, or when it fails, the daemon does the work itself.
"""

from __future__ import annotations

import gc
import os
import socket

from bootseer.mounts.forked import Helper, fork_helper
from bootseer.tree import erofs
from bootseer.tree.index import read_unchecked

DONE = b"+"
_HEAD_BYTES = 64  # the digest, hex


class Maker:
    """The daemon's end. `begin`, then `finish`; `close` in any case. For one thread at a time."""

    def __init__(self, helper: Helper | None) -> None:
        """`helper`: None of one that could not be started, and so makes nothing."""
        self._helper = helper
        self._is_asked = False

    @property
    def pid(self) -> int:
        """0: there is none, or no longer."""
        return self._helper.pid if self._helper is not None else 0

    def begin(self, index_bytes: bytes, digest: str) -> None:
        """Gives it an index object with this digest. What goes wrong is seen in `finish`."""
        if self._helper is None:
            return
        try:
            fd = os.memfd_create("index", os.MFD_CLOEXEC)
            try:
                with open(fd, "wb", buffering=0, closefd=False) as file:
                    file.write(index_bytes)
                socket.send_fds(self._helper.connection, [digest.encode()], [fd])
            finally:
                os.close(fd)
            self._is_asked = True
        except OSError:
            pass

    def finish(self) -> bytearray | None:
        """The metadata; None when it has failed. Blocks. Ends it."""
        data: bytearray | None = None
        try:
            if self._helper is not None and self._is_asked:
                said, fds, _, _ = socket.recv_fds(self._helper.connection, len(DONE), 1)
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
        helper, self._helper = self._helper, None
        if helper is not None:
            helper.end()


_waiting: list[Maker] = []  # at most one


def start() -> None:
    """Forks it; to be called before this process has threads. Never fails."""
    helper = fork_helper("tree-maker", socket.SOCK_SEQPACKET, _make)
    if helper is not None:
        _waiting.append(Maker(helper))


def take() -> Maker:
    """The one that was started, the caller's then; else one that makes nothing."""
    return _waiting.pop() if _waiting else Maker(None)


def _make(connection: socket.socket) -> int:
    digest, fds, _, _ = socket.recv_fds(connection, _HEAD_BYTES, 1)
    if not fds:
        return 0  # it is not needed
    gc.disable()
    with open(fds[0], "rb", buffering=0) as file:
        index_bytes = os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0)
    data = erofs.metadata(read_unchecked(index_bytes, digest.decode(), "the index"), digest.decode())
    fd = os.memfd_create("metadata", os.MFD_CLOEXEC)
    with open(fd, "wb", buffering=0) as file:
        if file.write(data) == len(data):
            socket.send_fds(connection, [DONE], [fd])
    return 0
