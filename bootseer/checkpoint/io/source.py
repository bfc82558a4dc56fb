"""The source of a pinned version of a checkpoint: a store, or this node's arena.

All interfaces (Python API, safetensors, fsspec, DCP, FUSE) use this; they know neither stripes nor stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class SourceFile(NamedTuple):
    """One file of the version, as a saver named it."""

    path: str
    size: int  # bytes
    checked_bytes: int = 0  # reads verify only whole units of this size; 0: reads need no alignment


class Request(NamedTuple):
    """A range of one file and the memory to fill."""

    path: str
    offset: int  # bytes
    target: memoryview  # bytes, writable, contiguous


class Source(Protocol):
    """One version, which never changes while this is open. Any thread may call it.

    Errors are BootseerError. Unverified bytes are never handed out: after an error, the content of targets is
    undefined.
    """

    url: str
    version: str  # "" for unstriped files
    digest: str  # SHA-256, hex, of the manifest, or of the names, sizes and etags of unstriped files
    files: Mapping[str, SourceFile]

    def read(self, requests: Sequence[Request]) -> None:
        """Fill all targets, many at once, and return when the last one is full.

        Raises: NotFound for a path that is not in `files`; Truncated for a range past the end of a file.
        """

    def map(self, path: str, offset: int, length: int) -> memoryview | None:
        """Return the bytes as memory without a copy, once they are present; None if impossible (then use `read`).

        It is writable, private to this process, and lives for as long as a view of it does.
        """

    def close(self) -> None:
        """Close connections; mapped views stay valid."""

    def statistics(self) -> dict[str, int]:
        """Return counters: at least `requests`, `read_bytes` (from the store, by this process)."""
