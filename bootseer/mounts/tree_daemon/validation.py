"""Validation of an index by the starter of a daemon, while the daemon starts and makes the mount.

A first start waits for two long steps: validation of the index, and making its metadata. A starter that validates
the index anyway, as for an environment, does the longest parts: names and files. The daemon validates the list of
blocks, and its maker makes the metadata and does the rest of the validation. Starter and daemon are the same
user's, so they can trust each other. The daemon mounts nothing before all parts are reported valid. If a report is
missing, because its process has died or has found an error, the daemon does the whole validation itself.
"""

from __future__ import annotations

import fcntl
import os
from typing import Protocol

from bootseer.errors import IntegrityError
from bootseer.mounts.tree_daemon.orders import RIGHT
from bootseer.tree.index import MAX_INDEX_BYTES, digest_of

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class IndexValidation(Protocol):
    """The starter's part of the validation."""

    def index_bytes(self) -> bytes | None:
        """Return the index object, of the right digest; None: the daemon does everything. Blocks."""
        ...

    def report(self, fd: int) -> None:
        """Write RIGHT to `fd`, a pipe, once its part is valid; close it in any case."""
        ...


class SuppliedIndex:
    """The daemon's end: the index sent with its order."""

    def __init__(self, index: int, verdict: int) -> None:
        """Args: index: a memory file; verdict: a pipe."""
        self._index, self._verdict = index, verdict

    def read(self, digest: str) -> bytes:
        """Return the index object. Raises: IntegrityError when it is not of this digest."""
        data = os.pread(self._index, min(os.fstat(self._index).st_size, MAX_INDEX_BYTES), 0)
        if digest_of(data) != digest:
            raise IntegrityError(f"the index sent with the order is not {digest}")
        return data

    def is_right(self) -> bool:
        """Return whether the starter reports it valid, once; block until then or until it has ended."""
        return os.read(self._verdict, len(RIGHT)) == RIGHT

    def close(self) -> None:
        for fd in (self._index, self._verdict):
            os.close(fd)


def to_memory(data: bytes) -> int:
    """Return a sealed memory file with this data. Raises: OSError."""
    fd = os.memfd_create("index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", buffering=0, closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
