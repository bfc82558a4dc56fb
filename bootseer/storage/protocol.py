"""The interface of stores: files by path, read by range into the caller's memory, published whole or not at all.

There is one implementation for each kind of place: local, memory, HTTP, HDFS, object stores, any fsspec file
system. All pass `tests/testing/store_suite.py`. `bootseer.storage.engine.ranges` adds parallel ranges, retries,
concurrency and hedging.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, runtime_checkable


class Stat(NamedTuple):
    """The version of a file. Versions differ in `etag`: ETag; inode, mtime and size; HDFS file id and mtime."""

    size: int  # bytes
    etag: str  # "" where the store cannot distinguish versions


class Entry(NamedTuple):
    """One name in a directory."""

    name: str  # without the directory
    size: int  # bytes; 0 for directories
    is_folder: bool
    mtime_s: float  # since the epoch; 0.0 where unknown


class Features(NamedTuple):
    """Optional abilities of a store."""

    creates_if_absent: bool  # `publish(if_absent=True)` is one atomic step, also against other writers
    concatenates: bool  # `concat` joins files without copying their bytes
    has_replicas: bool  # `read_into(attempt=1)` can use another replica or connection


class StoreWriter(Protocol):
    """A writer of one new file, from start to end. `Store.create` makes it."""

    async def write(self, data: memoryview | bytes) -> None:
        """Append `data`; return when the caller may reuse its memory."""


class Store(Protocol):
    """Paths are relative to the store's root, with `/` between names and none at the ends.

    Every call ends with StorageTimeout after `timeout_s` without progress (given when the store is made). Stores
    map foreign exceptions to StorageError, IntegrityError or ConfigError, chained.
    """

    url: str  # of the root, without secrets
    features: Features

    async def stat(self, path: str) -> Stat:
        """Return the version of a file. Raises: NotFound for a missing file and for directories."""

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        """Fill `target` (bytes, writable, contiguous) from `offset` on.

        After it has returned, raised or been cancelled, nothing writes to `target`. With `etag`, bytes of another
        version raise SourceChanged. `attempt` > 0 requests another route to the bytes: a new connection, another
        replica.

        Raises: Truncated when the file is shorter; StorageError with the number of valid bytes as `read_bytes`.
        """

    async def list(self, directory: str) -> list[Entry]:
        """List, sorted by name. A missing directory raises NotFound; without directories it is empty."""

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        """Write a small file atomically: readers see the old or the new file, whole.

        Raises: AlreadyExists with `if_absent`, even where the check is not atomic (`features`).
        """

    def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AbstractAsyncContextManager[StoreWriter]:
        """Create a new file. It gets its name when the block ends without an error, and is deleted otherwise.

        The store makes parent directories. The name must be new; nothing is overwritten. `size`: in bytes, if
        known. `placement`: any number; where possible, files with different numbers begin on different servers.
        """

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        """Join `parts` (same directory, at least one) in order into the new file `path`, and remove them.

        A part that cannot be removed stays: the new file is complete.
        """

    async def delete(self, path: str) -> None:
        """Delete a file, or a directory with its contents; a missing path is no error."""

    async def aclose(self) -> None:
        """Close connections and threads."""

    def statistics(self) -> dict[str, int]:
        """Return counts since the start: at least `requests`, `read_bytes`, `written_bytes`, `retries`."""


@runtime_checkable
class SecondHand(Protocol):
    """A store that passes on unverified data of peers. The reader that verifies it reports damage by `distrust`.

    The next `read_into(attempt=1)` uses another source. Thread-safe.
    """

    def distrust(self, path: str, offset: int, length: int) -> None:
        """Report that these bytes, as they were last read, are wrong."""


@runtime_checkable
class HasPeers(Protocol):
    """A store that requests data from other nodes first (bootseer.peers)."""

    async def meet(self, size_bytes: int, is_over: Callable[[], bool] = ...) -> None:
        """Before a read of `size_bytes`, wait briefly for peers, unless `is_over()`."""
