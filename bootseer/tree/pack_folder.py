"""Writer of packs of a new tree into the store whose root is the tree's directory: each pack once.

Packs of an earlier build are not written again; a file with a pack's name but other contents is replaced.
"""

from __future__ import annotations

from collections.abc import Sequence

from bootseer import aio
from bootseer.errors import AlreadyExists, IntegrityError, NotFound, SourceChanged
from bootseer.storage import RangeReader, RangeRequest, Store
from bootseer.storage.small_files import list_if_there
from bootseer.tree.index import PACKS


class PackWriter:
    """`put` is for `bootseer.tree.builder.building.build`, which calls it from threads."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def put(self, digest: str, data: bytes) -> None:
        """Store a pack under its digest. Raises: StorageError."""
        aio.run_sync(self._put(f"{PACKS}/{digest}", data))

    async def check(self, packs: Sequence[tuple[bytes, int]]) -> None:
        """Check before publishing that all packs (digest, bytes) of a tree exist.

        Raises: SourceChanged when another process has removed one; StorageError.
        """
        if not packs:
            return
        there = {entry.name: entry.size for entry in await list_if_there(self._store, PACKS)}
        for digest, size in packs:
            if there.get(digest.hex()) != size:
                raise SourceChanged(
                    f"{self._store.url}: {PACKS}/{digest.hex()} was removed during the build: build again,"
                    " and not during a garbage collection"
                )

    async def _put(self, path: str, data: bytes) -> None:
        try:
            async with self._store.create(path, size=len(data)) as writer:
                await writer.write(data)
        except AlreadyExists:
            if not await self._is_same(path, data):
                await self._store.publish(path, data)  # the file of this name has other contents

    async def _is_same(self, path: str, data: bytes) -> bool:
        """Return whether an earlier build has written these bytes there."""
        try:
            if (await self._store.stat(path)).size != len(data):
                return False
            there = bytearray(len(data))
            await RangeReader(self._store).read([RangeRequest(path, 0, memoryview(there))])
            return there == data
        except (NotFound, IntegrityError):
            return False
