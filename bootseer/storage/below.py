"""A directory of a store as a store of its own: the same connections, other names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from bootseer.storage.paths import check_path
from bootseer.storage.protocol import Entry, Features, SecondHand, Stat, Store, StoreWriter


class SubdirectoryStore:
    """A `Store` that cannot name anything outside `folder`. Closing it does not close `store`."""

    def __init__(self, store: Store, folder: str) -> None:
        self._store = store
        self._directory = check_path(store.url, folder)
        self.url = f"{store.url.rstrip('/')}/{folder}"
        self.features: Features = store.features

    async def stat(self, path: str) -> Stat:
        return await self._store.stat(self._full(path))

    async def read_into(
        self, path: str, offset: int, target: memoryview, *, etag: str = "", attempt: int = 0
    ) -> None:
        await self._store.read_into(self._full(path), offset, target, etag=etag, attempt=attempt)

    async def list(self, directory: str) -> list[Entry]:
        check_path(self.url, directory, is_folder=True)
        return await self._store.list(f"{self._directory}/{directory}" if directory else self._directory)

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        return await self._store.publish(self._full(path), data, if_absent=if_absent)

    def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AbstractAsyncContextManager[StoreWriter]:
        return self._store.create(self._full(path), size=size, placement=placement)

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        await self._store.concat(self._full(path), [self._full(part) for part in parts])

    async def delete(self, path: str) -> None:
        await self._store.delete(self._full(path))

    def distrust(self, path: str, offset: int, length: int) -> None:
        """Report wrong bytes to the store, if it takes such reports."""
        if isinstance(self._store, SecondHand):
            self._store.distrust(self._full(path), offset, length)

    async def aclose(self) -> None:
        """Do nothing: the caller that opened the store closes it."""

    def statistics(self) -> dict[str, int]:
        """Return the counts of the whole store."""
        return self._store.statistics()

    def _full(self, path: str) -> str:
        return f"{self._directory}/{check_path(self.url, path)}"
