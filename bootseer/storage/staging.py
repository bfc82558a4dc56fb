"""Small files that are written before the decision to publish them; publishing is then one short step.

On HDFS, writing a few bytes takes half a second: the NameNode learns of a block after the writer, and the client
polls only then. The rename that publishes the file takes milliseconds. Where `publish` is fast anyway, the bytes
are kept in memory until then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from bootseer import aio
from bootseer.errors import StorageError
from bootseer.storage.protocol import Store


class StoredFile(Protocol):
    """A stored file that is not visible yet. It is published once, or discarded."""

    async def publish(self, *, if_absent: bool = False) -> None:
        """Publish as `Store.publish`. After an error it is used up, as the result may be unknown."""

    async def discard(self) -> None:
        """Delete it unless it is published; never fails."""


@runtime_checkable
class StagingStore(Protocol):
    """A store that can write a file before publishing it."""

    async def stage(self, path: str, data: bytes, *, folder: str) -> StoredFile | None:
        """Write the future `path` under a hidden name in `folder`; None where that saves nothing."""


class Staged:
    """A file made by `stage`."""

    def __init__(self, store: Store, path: str, data: bytes, stored: StoredFile | None = None) -> None:
        self._store = store
        self._path = path
        self._data = data
        self._stored = stored

    async def publish(self, *, if_absent: bool = False) -> None:
        """Publish as `Store.publish`; may be called again after an error, and then writes anew."""
        stored, self._stored = self._stored, None
        if stored is None:
            await self._store.publish(self._path, self._data, if_absent=if_absent)
        else:
            await stored.publish(if_absent=if_absent)

    async def discard(self) -> None:
        """Delete an unpublished file; never fails."""
        stored, self._stored = self._stored, None
        if stored is not None:
            await stored.discard()


async def stage(store: Store, path: str, data: bytes, *, folder: str) -> Staged:
    """Write the future `path` beforehand, below `folder` until then; `publish` handles failures."""
    stored = None
    if isinstance(store, StagingStore):
        try:
            stored = await store.stage(path, data, folder=folder)
        except StorageError:
            pass
    return Staged(store, path, data, stored)


@asynccontextmanager
async def staged(store: Store, files: Sequence[tuple[str, bytes]], *, folder: str) -> AsyncIterator[list[Staged]]:
    """Stage several files (path, data) at once; discard the unpublished ones at the end of the block."""
    made: list[Staged] = []

    async def make(file: tuple[str, bytes]) -> Staged:
        made.append(await stage(store, *file, folder=folder))
        return made[-1]

    try:
        yield await aio.map_bounded(make, files, width=len(files))
    finally:
        for each in made:
            await each.discard()
