"""Small files that are written before it is known whether they will be published, and then take one short step.

On HDFS writing a few bytes takes half a second, as the NameNode hears of a block later than the writer and the
client asks again only then; the rename that publishes them takes milliseconds. Stores whose `publish` is quick
anyway have nothing to gain: there the bytes are kept until then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, runtime_checkable

from bootseer import aio
from bootseer.errors import StorageError
from bootseer.storage.protocol import Store


class Stored(Protocol):
    """A file that is stored and that nobody sees yet. It is published once, or discarded."""

    async def publish(self, *, if_absent: bool = False) -> None:
        """As `Store.publish`. After an error it is used up: whether it came through is not always known."""

    async def discard(self) -> None:
        """Takes it away unless it is published; never fails."""


@runtime_checkable
class Stages(Protocol):
    """A store that can write beforehand."""

    async def stage(self, path: str, data: bytes, *, folder: str) -> Stored | None:
        """Writes what will be `path`, for now under a hidden name in `folder`; None where that gains nothing."""


class Staged:
    """Made by `stage`."""

    def __init__(self, store: Store, path: str, data: bytes, stored: Stored | None = None) -> None:
        self._store = store
        self._path = path
        self._data = data
        self._stored = stored

    async def publish(self, *, if_absent: bool = False) -> None:
        """As `Store.publish`; also again after an error, then by writing it anew."""
        stored, self._stored = self._stored, None
        if stored is None:
            await self._store.publish(self._path, self._data, if_absent=if_absent)
        else:
            await stored.publish(if_absent=if_absent)

    async def discard(self) -> None:
        """Takes away what was not published; never fails."""
        stored, self._stored = self._stored, None
        if stored is not None:
            await stored.discard()


async def stage(store: Store, path: str, data: bytes, *, folder: str) -> Staged:
    """Writes beforehand what will be `path`, below `folder` until then; trouble is left to the publishing."""
    stored = None
    if isinstance(store, Stages):
        try:
            stored = await store.stage(path, data, folder=folder)
        except StorageError:
            pass
    return Staged(store, path, data, stored)


@asynccontextmanager
async def staged(store: Store, files: Sequence[tuple[str, bytes]], *, folder: str) -> AsyncIterator[list[Staged]]:
    """Stages several files (path, data) at once; what is not published when the block ends is taken away."""
    made: list[Staged] = []

    async def make(file: tuple[str, bytes]) -> Staged:
        made.append(await stage(store, *file, folder=folder))
        return made[-1]

    try:
        yield await aio.map_bounded(make, files, width=len(files))
    finally:
        for each in made:
            await each.discard()
