"""An index that whoever starts a daemon looks at itself, while the daemon gets ready and makes what it shows.

A first start waits for two long steps: the check of the index, and the metadata that is made of it. A starter
that has to look at the index anyway, as one of an environment has, makes the longest parts of the check, names and
files; the daemon looks at the list of blocks, and its maker makes the metadata and the rest of the check. Starter
and daemon are the same user's, so one can believe the other. The daemon shows nothing before all have said that it
is right. When one never says so, because it has died or has found something, the daemon makes the whole check
itself.
"""

from __future__ import annotations

import fcntl
import os
from typing import Protocol

from bootseer.errors import IntegrityError
from bootseer.mounts.tree_orders import RIGHT
from bootseer.tree.index import MOST_INDEX_BYTES, digest_of

_SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class Vetting(Protocol):
    """The starter's part."""

    def index_bytes(self) -> bytes | None:
        """The index object, of the right digest; None: the daemon has to do it all. Blocks."""
        ...

    def report(self, fd: int) -> None:
        """Has RIGHT written to `fd`, a pipe, when what it looks at is right; it is closed in any case."""
        ...


class Vetted:
    """The daemon's: what came with its order."""

    def __init__(self, index: int, verdict: int) -> None:
        """Args: index: a memory file; verdict: a pipe."""
        self._index, self._verdict = index, verdict

    def read(self, digest: str) -> bytes:
        """The index object. Raises: IntegrityError when it is not of this digest."""
        data = os.pread(self._index, min(os.fstat(self._index).st_size, MOST_INDEX_BYTES), 0)
        if digest_of(data) != digest:
            raise IntegrityError(f"the index that came with the order is not {digest}")
        return data

    def is_right(self) -> bool:
        """Whether the starter says so, once; blocks until it does or has ended."""
        return os.read(self._verdict, len(RIGHT)) == RIGHT

    def close(self) -> None:
        for fd in (self._index, self._verdict):
            os.close(fd)


def to_memory(data: bytes) -> int:
    """A memory file with this, which nobody can change any more. Raises: OSError."""
    fd = os.memfd_create("index", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(fd, "wb", buffering=0, closefd=False) as file:
            file.write(data)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
