"""Packs of a tree that is being built, into the store whose root is the tree's folder: each once.

What an earlier build has written is found and not written again; what only has its name is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from bootseer import aio
from bootseer.errors import AlreadyExists, IntegrityError, NotFound, SourceChanged
from bootseer.storage import RangeReader, RangeRequest, Store
from bootseer.tree.index import PACKS


class PackFolder:
    """`put` is what `bootseer.tree.building.build` wants: it is called from threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, digest: str, data: bytes) -> None:
        """Stores a pack under its digest. Raises: StorageError."""
        aio.run_sync(self._put(f"{PACKS}/{digest}", data))

    async def check(self, packs: Sequence[tuple[bytes, int]]) -> None:
        """That the packs (digest, bytes) of a tree are all there; before it is published.

        Raises: SourceChanged when somebody took one away meanwhile; StorageError.
        """
        if not packs:
            return
        try:
            there = {entry.name: entry.size for entry in await self._store.list(PACKS)}
        except NotFound:
            there = {}
        for digest, size in packs:
            if there.get(digest.hex()) != size:
                raise SourceChanged(
                    f"{self._store.url}: {PACKS}/{digest.hex()} was taken away during the build: build again,"
                    " and not beside a garbage collection"
                )

    async def _put(self, path: str, data: bytes) -> None:
        try:
            async with self._store.create(path, size=len(data)) as writer:
                await writer.write(data)
        except AlreadyExists:
            if not await self._is_same(path, data):
                await self._store.publish(path, data)  # what has its name is not it

    async def _is_same(self, path: str, data: bytes) -> bool:
        """Whether an earlier build has written these bytes there."""
        try:
            if (await self._store.stat(path)).size != len(data):
                return False
            there = bytearray(len(data))
            await RangeReader(self._store).read([RangeRequest(path, 0, memoryview(there))])
            return there == data
        except (NotFound, IntegrityError):
            return False
