"""Where a pinned version of a checkpoint is read from: a store, or this node's arena.

All ways in (Python API, safetensors, fsspec, DCP, FUSE) stand on this; they know neither stripes nor stores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class SourceFile(NamedTuple):
    """One file of the version, as a saver named it."""

    path: str
    size: int  # bytes
    checked_bytes: int = 0  # only whole units of so much are checked as they are read; 0: any range is as good


class Request(NamedTuple):
    """Bytes of one file and the memory that they belong in."""

    path: str
    offset: int  # bytes
    target: memoryview  # bytes, writable, contiguous


class Source(Protocol):
    """One version, which never changes while this is open. Calls may come from any thread.

    Errors are BootseerError; bytes that are not known to be right are never handed out: after an error a target's
    content means nothing.
    """

    url: str
    version: str  # "" for unstriped files
    digest: str  # SHA-256, hex, of the manifest, or of the names, sizes and etags of unstriped files
    files: Mapping[str, SourceFile]

    def read(self, requests: Sequence[Request]) -> None:
        """Fills all targets, many at once, and returns when the last one is full.

        Raises: NotFound for a path that is not in `files`; Truncated for a range past the end of a file.
        """

    def map(self, path: str, offset: int, length: int) -> memoryview | None:
        """The bytes as memory that needs no copy, once they are there; None where there is none (then `read`).

        It is writable, private to this process, and lives for as long as a view of it does.
        """

    def close(self) -> None:
        """Ends connections; mapped views stay valid."""

    def statistics(self) -> dict[str, int]:
        """Counts: at least `requests`, `read_bytes` (from the store, by this process)."""
