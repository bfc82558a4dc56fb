"""Failover reader: reads a span of blocks into the cache; tries other stores until every byte is right.

In: the span, memory for its stored bytes, the request. Out: all its blocks verified and stored, or one error that
names the first wrong block, its pack and the store that was read last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.blocks.spans import Span, StoredBlock
from bootseer.blocks.tree_cache import TreeCache
from bootseer.errors import BootseerError, ConfigError, IntegrityError, NotFound, StorageError, StorageTimeout
from bootseer.histogram import TimeHistogram
from bootseer.linux.cgroups import usable_cores
from bootseer.storage import RangeReader, RangeRequest, SecondHand, Store
from bootseer.tree.block_codec import block_digest, unpack_block
from bootseer.tree.index import Index
from bootseer.tuning import current

TRIES = 2  # reads of a block from each store, besides the retries of its reader


class StoreSource(NamedTuple):
    place: int
    store: Store
    reader: RangeReader


class StoreSources:
    """The stores that have a tree's packs, in order of preference: one that fails moves to the end for a while.

    Each has a reader of its own, which learns its speed. A peer that has only some packs is a full source: the
    next store is read for those that it lacks. The directory of the tree is their root. For one event loop.
    """

    def __init__(self, stores: Sequence[Store]) -> None:
        if not stores:
            raise ConfigError("there is no store to fetch blocks from")
        self._sources = [StoreSource(place, store, RangeReader(store)) for place, store in enumerate(stores)]
        self._down_until_s = [0.0] * len(stores)

    def ordered(self) -> list[StoreSource]:
        """Return the sources in the order in which to try them."""
        now_s = time.monotonic()
        return sorted(self._sources, key=lambda source: (self._down_until_s[source.place] > now_s, source.place))

    def failed(self, source: StoreSource, error: BootseerError) -> None:
        """Record that a read failed for good; a missing file is ignored, as other files may be there."""
        if not isinstance(error, NotFound):
            self._down_until_s[source.place] = time.monotonic() + current().blocks.store_rest_s

    def wrong(self, source: StoreSource, path: str, offset: int, length: int) -> None:
        """Record that bytes from it are wrong: the peer that sent them is distrusted."""
        if isinstance(source.store, SecondHand):
            source.store.distrust(path, offset, length)

    def statistics(self) -> dict[str, int]:
        """Return the totals of all readers: requests, bytes, retries."""
        totals = {"requests": 0, "read_bytes": 0, "retries": 0, "hedges": 0, "timeouts": 0}
        for source in self._sources:
            found = source.reader.statistics()
            for name in totals:
                totals[name] += found[name]
        return totals


class BlockRequest:
    """What a caller requests of some blocks."""

    def __init__(
        self,
        *,
        is_demand: bool,
        raws: dict[int, memoryview] | None = None,
        keeps: bool = True,
        try_s: float | None = None,
    ) -> None:
        self.is_demand = is_demand
        self.raws = raws  # filled with the bytes; None: the caller only needs them cached
        self.keeps = keeps  # store them in the cache
        self.try_s = try_s  # of one try at one store
        self.is_alone = False  # no longer waits for other requests


class InFlightBlock:
    def __init__(self, block: StoredBlock, *, is_wanted: bool) -> None:
        self.block = block
        self.is_wanted = is_wanted  # a reader wants its bytes, not only that it is cached
        self.is_done = asyncio.Event()
        self.raw: memoryview | None = None
        self.error: BootseerError | None = None  # of a demand read: all that wait for it get it as well


Land = Callable[[dict[int, memoryview], list[int], dict[int, InFlightBlock], BlockRequest], None]


class FailoverReader:
    """`land` receives the bytes that readers want and the numbers that the cache refused. For one event loop."""

    def __init__(self, index: Index, cache: TreeCache, sources: StoreSources, land: Land) -> None:
        self._index, self._cache, self._sources, self._land = index, cache, sources, land
        # Half of the processors: the other half belongs to the job that starts.
        most = min(current().blocks.unpack_threads, usable_cores() // 2)
        self._compute = asyncio.Semaphore(max(1, most))  # for blocks for which no reader waits
        self.counts = {"demand_blocks": 0, "prefetch_blocks": 0, "wrong_blocks": 0}
        self.request_times = TimeHistogram()  # of stores, whatever came of them

    async def read(
        self, span: Span, view: memoryview, in_flight: dict[int, InFlightBlock], want: BlockRequest
    ) -> None:
        """Fetch the blocks of a span into the cache through `view`, which is as long as the span."""
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
                began_s = time.monotonic()
                try:
                    async with asyncio.timeout(want.try_s):
                        await source.reader.read(requests, is_demand=want.is_demand, attempt=attempt)
                except TimeoutError:
                    failure = StorageTimeout(f"{source.store.url}/{where}: no data within {want.try_s:g} s")
                    continue
                except IntegrityError as error:
                    failure = error
                    continue
                except StorageError as error:
                    failure = error
                    break
                finally:
                    self.request_times.add(time.monotonic() - began_s)
                left = await self._unpack(left, view, span, source, in_flight, want)
                if not left:
                    return
                for block in left:
                    self._sources.wrong(source, where, block.offset, block.stored_bytes)
                failure = IntegrityError(
                    f"{source.store.url}/{where}: block {left[0].number}, bytes {left[0].offset} to {left[0].end},"
                    " does not match its digest in the index: the pack is damaged or was replaced"
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
        source: StoreSource,
        in_flight: dict[int, InFlightBlock],
        want: BlockRequest,
    ) -> list[StoredBlock]:
        """Verify, decompress and store the received blocks. Returns: blocks with wrong bytes."""
        parts = [(block, view[block.offset - span.offset : block.end - span.offset]) for block in blocks]
        cache = self._cache if want.keeps else None
        where = f"{source.store.url}/{self._index.pack_path(span.pack)}"

        def is_wanted(number: int) -> bool:
            return in_flight[number].is_wanted

        if want.is_demand:
            done = await aio.run_io(unpack_blocks, parts, cache, is_wanted, where)
        else:
            async with self._compute:
                done = await aio.run_io(unpack_blocks, parts, cache, is_wanted, where)
        self._land(done.raws, done.refused, in_flight, want)
        self.counts["demand_blocks" if want.is_demand else "prefetch_blocks"] += len(blocks) - len(done.wrong)
        self.counts["wrong_blocks"] += len(done.wrong)
        return done.wrong


def _request_of(block: StoredBlock, path: str, offset: int, view: memoryview) -> RangeRequest:
    return RangeRequest(path, block.offset, view[block.offset - offset : block.end - offset])


class UnpackedBlocks(NamedTuple):
    """The result for some blocks."""

    wrong: list[StoredBlock]  # have a wrong digest
    raws: dict[int, memoryview]  # bytes of those that readers want, and of those refused
    refused: list[int]  # the cache has no space for them


def unpack_blocks(
    parts: Sequence[tuple[StoredBlock, memoryview]],
    cache: TreeCache | None,
    is_wanted: Callable[[int], bool],
    where: str,
) -> UnpackedBlocks:
    """Fill `cache`, if there is one, with the received blocks.

    Raises: IntegrityError for a block that has the right digest but cannot be unpacked: its tree was built wrong.
    """
    done = UnpackedBlocks([], {}, [])
    for block, stored in parts:
        if block_digest(stored) != block.digest:
            done.wrong.append(block)
            continue
        raw = unpack_block(stored, block.raw_bytes, f"{where}: block {block.number}")
        is_kept = cache is not None and cache.fill(block.number, raw)
        if cache is not None and not is_kept:
            done.refused.append(block.number)
        if is_wanted(block.number) or not is_kept:
            # `stored` is memory that is used again.
            done.raws[block.number] = memoryview(raw if isinstance(raw, bytes) else bytes(raw))
    return done
