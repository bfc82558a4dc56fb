"""The writing half of `Store` for read-only stores: every method raises one error."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from bootseer.errors import StorageError
from bootseer.storage.protocol import Stat, StoreWriter


class ReadOnlyStore:
    """A base of read-only stores. `why_read_only`: the reason and the fix, for messages after the file's name."""

    url: str
    why_read_only: str

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Stat:
        del data, if_absent
        raise self._read_only(path)

    def create(
        self, path: str, *, size: int | None = None, placement: int | None = None
    ) -> AbstractAsyncContextManager[StoreWriter]:
        del size, placement
        raise self._read_only(path)

    async def concat(self, path: str, parts: Sequence[str]) -> None:
        del parts
        raise self._read_only(path)

    async def delete(self, path: str) -> None:
        raise self._read_only(path)

    def _read_only(self, path: str) -> StorageError:
        return StorageError(f"{self.url}: {path!r} cannot be written{self.why_read_only}")
