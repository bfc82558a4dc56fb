"""A span of blocks from one of several stores into the cache: other ways are tried until every byte is right.

In: the span, memory for its stored bytes, what is wanted. Out: all its blocks verified and kept, or one error that
names the first wrong block, its pack and the store that was asked last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bootseer import aio
from bootseer.blocks.flights import Flight, Want
from bootseer.blocks.sources import Source, Sources
from bootseer.blocks.spans import Span, StoredBlock
from bootseer.blocks.tree_cache import TreeCache
from bootseer.blocks.unpack import unpack_blocks
from bootseer.errors import BootseerError, IntegrityError, StorageError, StorageTimeout
from bootseer.storage import RangeRequest
from bootseer.storage.cpu_limits import usable_cores
from bootseer.tree.index import Index

TRIES = 2  # ways to a block at each store, besides those that its reader tries by itself
MOST_COMPUTING = 8  # threads that unpack what nobody waits for

Land = Callable[[dict[int, memoryview], list[int], dict[int, Flight], Want], None]


class Carrier:
    """`land` gets the bytes that somebody wants, and the numbers that the cache refused. For one event loop."""

    def __init__(self, index: Index, cache: TreeCache, sources: Sources, land: Land) -> None:
        self._index, self._cache, self._sources, self._land = index, cache, sources, land
        # Half of the processors: the other half belongs to the start that all this is for.
        self._compute = asyncio.Semaphore(max(1, min(MOST_COMPUTING, usable_cores() // 2)))
        self.counts = {"demand_blocks": 0, "prefetch_blocks": 0, "wrong_blocks": 0}

    async def carry(self, span: Span, view: memoryview, flights: dict[int, Flight], want: Want) -> None:
        """Brings the blocks of a span into the cache by way of `view`, which is as long."""
        where, offset = self._index.pack_path(span.pack), span.offset
        left = list(span.blocks)
        failure: BootseerError | None = None
        for source in self._sources.ordered():
            first = int(want.is_alone)
            for attempt in range(first, first + TRIES):
                if len(left) == len(span.blocks):
                    requests = [RangeRequest(where, offset, view)]
                else:
                    requests = [_request_of(block, where, offset, view) for block in left]
                try:
                    async with asyncio.timeout(want.try_s):
                        await source.reader.read(requests, is_demand=want.is_demand, attempt=attempt)
                except TimeoutError:
                    failure = StorageTimeout(f"{source.store.url}/{where}: nothing came within {want.try_s:g} s")
                    continue
                except IntegrityError as error:
                    failure = error
                    continue
                except StorageError as error:
                    failure = error
                    break
                left = await self._unpack(left, view, span, source, flights, want)
                if not left:
                    return
                for block in left:
                    self._sources.wrong(source, where, block.offset, block.stored_bytes)
                failure = IntegrityError(
                    f"{source.store.url}/{where}: block {left[0].number}, bytes {left[0].offset} to {left[0].end},"
                    " has not the digest that the index says: the pack is damaged or was replaced"
                )
            assert failure is not None
            self._sources.failed(source, failure)
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # it holds this frame

    async def _unpack(
        self,
        blocks: list[StoredBlock],
        view: memoryview,
        span: Span,
        source: Source,
        flights: dict[int, Flight],
        want: Want,
    ) -> list[StoredBlock]:
        """Verifies, decompresses and keeps what has come. Returns: blocks that came with wrong bytes."""
        parts = [(block, view[block.offset - span.offset : block.end - span.offset]) for block in blocks]
        cache = self._cache if want.keeps else None
        where = f"{source.store.url}/{self._index.pack_path(span.pack)}"

        def is_wanted(number: int) -> bool:
            return flights[number].is_wanted

        if want.is_demand:
            done = await aio.run_io(unpack_blocks, parts, cache, is_wanted, where)
        else:
            async with self._compute:
                done = await aio.run_io(unpack_blocks, parts, cache, is_wanted, where)
        self._land(done.raws, done.refused, flights, want)
        self.counts["demand_blocks" if want.is_demand else "prefetch_blocks"] += len(blocks) - len(done.wrong)
        self.counts["wrong_blocks"] += len(done.wrong)
        return done.wrong


def _request_of(block: StoredBlock, path: str, offset: int, view: memoryview) -> RangeRequest:
    return RangeRequest(path, block.offset, view[block.offset - offset : block.end - offset])
