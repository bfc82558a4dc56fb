"""What a store is: files by path, read by range into the caller's memory, published whole or not at all.

One implementation for each kind of place (local, memory, HTTP, HDFS, object stores, any fsspec file system); all
pass `bootseer.testing.store_suite`. Many ranges, retries, concurrency and hedging are the business of
`bootseer.storage.ranges`, which stands on this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple, Protocol, runtime_checkable


class Stat(NamedTuple):
    """A file as it is now. Versions differ in `etag`: ETag; inode, mtime and size; HDFS file id and mtime."""

    size: int  # bytes
    etag: str  # "" where the store has nothing that tells versions apart


class Entry(NamedTuple):
    """One name in a folder."""

    name: str  # without the folder
    size: int  # bytes; 0 for folders
    is_folder: bool
    mtime_s: float  # since the epoch; 0.0 where unknown


class Features(NamedTuple):
    """What a store can do beyond the least."""

    creates_if_absent: bool  # `publish(if_absent=True)` is one atomic step, also against other writers
    concatenates: bool  # `concat` joins files without copying their bytes
    has_replicas: bool  # `read_into(attempt=1)` can reach the bytes another way


class StoreWriter(Protocol):
    """Writes one new file from start to end. Made by `Store.create`."""

    async def write(self, data: memoryview | bytes) -> None:
        """Appends; returns when `data` may be used again."""


class Store(Protocol):
    """Paths are relative to the store's root, with `/` between names and none at the ends.

    Every call ends within `timeout_s` without progress (given when the store is made) by StorageTimeout. Foreign
    exceptions never get out: they are StorageError, IntegrityError or ConfigError, chained.
    """

    url: str  # of the root, without secrets
    features: Features

    async def stat(self, path: str) -> Stat:
        """Raises NotFound for what is missing and for folders."""

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        """Fills `target` (bytes, writable, contiguous) from `offset` on.

        When it has returned, raised or been cancelled, nothing writes to `target` any more. With `etag`, bytes of
        another version are never taken for those asked for (SourceChanged). `attempt` > 0 asks for another way to
        the bytes: a new connection, another replica.

        Raises: Truncated when the file ends before; StorageError whose `read_bytes` are right in `target`.
        """

    async def list(self, folder: str) -> list[Entry]:
        """Sorted by name. A missing folder raises NotFound where the store has folders, else it is empty."""

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        """Writes a small file so that readers see the old one, or the new one whole, at any moment.

        Raises: AlreadyExists with `if_absent`, also where that is not atomic (`features`).
        """

    def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AbstractAsyncContextManager[StoreWriter]:
        """A new file, there under its name when the block ends without an error, gone when it ends with one.

        Folders above it are made. The name must be new; nothing is overwritten. `size` in bytes, if known.
        `placement` is any number: files with different ones begin on different servers as far as the store can.
        """

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        """Joins `parts` (same folder, at least one) in order into the new file `path`; they are gone then."""

    async def delete(self, path: str) -> None:
        """A file, or a folder with all that is in it; what is missing is no error."""

    async def aclose(self) -> None:
        """Ends connections and threads."""

    def statistics(self) -> dict[str, int]:
        """Counts since it was made: at least `requests`, `read_bytes`, `written_bytes`, `retries`."""


@runtime_checkable
class SecondHand(Protocol):
    """A store that hands on what others gave it, unseen. Whoever verifies it says what was wrong.

    Then `read_into(attempt=1)` gives the bytes another way. From any thread.
    """

    def distrust(self, path: str, offset: int, length: int) -> None:
        """These bytes, of the last read of them, are not what they should be."""


@runtime_checkable
class HasPeers(Protocol):
    """A store that asks other nodes first (bootseer.peers)."""

    async def meet(self, size_bytes: int, is_over: Callable[[], bool] = ...) -> None:
        """Before so much is read: waits a moment for them, unless it is over."""
