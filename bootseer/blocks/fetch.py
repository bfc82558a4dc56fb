"""Fetching blocks from stores into the cache: each once, for all readers, and verified before use.

In: numbers of blocks. Out: they are in the cache, or returned to the caller, or there is one error. A block that
is in flight is waited for: in this process by its future, in others by a lock that the kernel frees. The wait for
a process that makes no progress is short, as a block that is fetched twice does no harm. Demand goes before
prefetch. The memory for stored blocks is bounded, and so is the size of each. One fetcher belongs to one event
loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from bootseer import aio
from bootseer.backoff import Backoff
from bootseer.blocks.dedup_sources import DedupSources
from bootseer.blocks.failover_reader import TRIES, BlockRequest, FailoverReader, InFlightBlock, StoreSources
from bootseer.blocks.spans import COLD_SPAN_BYTES, HOT_SPAN_BYTES, MAX_GAP_BYTES, Span, StoredBlock, plan_spans
from bootseer.blocks.stall_time import StallTime
from bootseer.blocks.tree_cache import TreeCache
from bootseer.errors import BootseerError, IntegrityError, StorageTimeout
from bootseer.jitter import jitter
from bootseer.storage import Store
from bootseer.storage.engine.bounce import BouncePool
from bootseer.tree.index import Index

DEADLINE_S = 30.0  # of a read that blocks a reader
AGAIN_S = 2.0  # of one whose block, or store, has failed for longer than that already
MAX_FAILING = 4096  # failed blocks that are remembered
PATIENCE_S = 5.0  # wait for another process that is fetching a block
POLL_S, MAX_POLL_S = 0.002, 0.05
PAUSES = Backoff(0.1, 2.0)  # of a blocked reader, after a store has failed
ROUNDS = 3  # for a block that is damaged again right after it was fetched
DEMAND_SPANS, PREFETCH_SPANS = 32, 16  # in memory at once
RECENT_BLOCKS = 256  # kept in memory while there is no space for them on disk
_INLINE = 2  # at most so many blocks are read from the cache without a thread
_COUNTS = ("donated_blocks", "joined", "waited_for_others")


class BlockFetcher:
    """Fill `cache` with blocks of `index` from `stores`, in this order; their root is the directory of the tree.

    `deadline_s`: limit of a read that blocks a reader; `again_s` is the limit once its block or the store has
    failed for that long. `waits`: the stall time of readers.
    """

    def __init__(
        self,
        index: Index,
        cache: TreeCache,
        stores: Sequence[Store],
        *,
        dedup_sources: DedupSources | None = None,
        deadline_s: float = DEADLINE_S,
        again_s: float = AGAIN_S,
        max_gap_bytes: int = MAX_GAP_BYTES,
    ) -> None:
        if cache.block_count != index.block_count:
            raise ValueError(f"a cache of {cache.block_count} blocks for a tree of {index.block_count}")
        self.index, self.cache = index, cache
        self.waits = StallTime()
        self._sources = StoreSources(stores)
        self._dedup_sources = dedup_sources
        self._is_building = asyncio.Lock()
        self._deadline_s = deadline_s
        self._again_s = min(again_s, deadline_s)
        self._patience_s = min(PATIENCE_S, deadline_s / 4)
        self._max_gap_bytes = max_gap_bytes
        self._in_flight: dict[int, InFlightBlock] = {}
        self._recent: OrderedDict[int, memoryview] = OrderedDict()
        self._demand_memory = BouncePool(HOT_SPAN_BYTES, DEMAND_SPANS)
        self._prefetch_memory = BouncePool(COLD_SPAN_BYTES, PREFETCH_SPANS)
        self._reader = FailoverReader(index, cache, self._sources, self._deliver)
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._failing_s: dict[int, float] = {}  # since when a block fails
        self._down_s: float | None = None  # since when all demand reads fail
        self._last_failure = ""  # of a demand read, one line

    async def prepare(self) -> None:
        """Find out what other trees have; done once. All callers but blocked readers wait for it."""
        async with self._is_building:
            if self._dedup_sources is not None and not self._dedup_sources.is_built:
                await aio.run_io(self._dedup_sources.build)

    async def ensure(self, numbers: Iterable[int], *, is_demand: bool = False) -> None:
        """Fetch blocks into the cache. Blocks that another process fetches without progress may stay missing.

        Raises: StorageError, IntegrityError naming the block, the pack and the store.
        """
        await self.prepare()
        await self._fetch_all(self.cache.missing(numbers), BlockRequest(is_demand=is_demand))

    async def read(self, numbers: Iterable[int], *, keeps: bool = True) -> dict[int, memoryview]:
        """Return the raw bytes of blocks, from the cache or a store; with `keeps` they are cached as well.

        Raises: StorageError, IntegrityError.
        """
        await self.prepare()
        return await self._read(numbers, BlockRequest(is_demand=True, raws={}, keeps=keeps))

    async def read_now(self, numbers: Iterable[int], *, since_s: float | None = None) -> dict[int, memoryview]:
        """Return the raw bytes of blocks for a reader that has been blocked since `since_s` (`time.monotonic`).

        Errors, wrong bytes and refusals are retried until the deadline. An error would end the program that reads,
        and by then a store may recover or another one may have the block. After that long a failure is not waited
        for again: a program that continues after an error would block at each of its reads.

        Raises: StorageTimeout at the deadline, or a StorageError or IntegrityError that is not transient.
        """
        wanted = list(numbers)
        begin_s = time.monotonic() if since_s is None else since_s
        end_s = self._end_s(wanted, begin_s)
        failure: BootseerError | None = None
        with self.waits.one(since_s):
            for failures in count(1):
                try:
                    # A scope for each try: Python 3.11 lets none expire that was open when a TaskGroup failed.
                    async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                        want = BlockRequest(is_demand=True, raws={}, try_s=self._deadline_s / (TRIES + 1))
                        found = await self._read(wanted, want)
                    self._down_s = None
                    for number in wanted:
                        self._failing_s.pop(number, None)
                    return found
                except TimeoutError:
                    pass  # of the last try
                except BootseerError as error:
                    failure = error
                self._record_failure(wanted, begin_s, is_wrong=isinstance(failure, IntegrityError))
                self._last_failure = str(failure or self._late(wanted[0], None, time.monotonic() - begin_s))
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    try:
                        raise self._late(wanted[0], failure, time.monotonic() - begin_s)
                    finally:
                        del failure  # it holds this frame
                await asyncio.sleep(min(PAUSES.wait_s(failures, jitter()), left_s))
        raise AssertionError("tries do not end")

    def _end_s(self, wanted: Iterable[int], begin_s: float) -> float:
        """Return until when a read that began at `begin_s` is retried."""
        since_s = [self._failing_s[number] for number in wanted if number in self._failing_s]
        if self._down_s is not None:
            since_s.append(self._down_s)
        return max(begin_s + self._again_s, min(since_s, default=begin_s) + self._deadline_s)

    def _record_failure(self, wanted: Iterable[int], begin_s: float, *, is_wrong: bool) -> None:
        """Record a failed try. `is_wrong`: bytes were received, so the store is up."""
        if len(self._failing_s) > MAX_FAILING:
            self._failing_s.clear()
        for number in wanted:
            self._failing_s.setdefault(number, begin_s)
        if self._down_s is None and not is_wrong:
            self._down_s = time.monotonic()

    def failing(self) -> tuple[int, str]:
        """Return how many missing blocks failed when readers last needed them, and the last error."""
        count = sum(not self.cache.has(number) for number in list(self._failing_s))
        return count, self._last_failure if count else ""

    def release_dedup_sources(self) -> None:
        """Release the other trees, so that they can be evicted."""
        if self._dedup_sources is not None:
            dedup_sources, self._dedup_sources = self._dedup_sources, None
            dedup_sources.close()

    def statistics(self) -> dict[str, float]:
        """Return counts since it was made: blocks by origin, requests to stores, stall time of readers.

        `blocked_s`: time in which at least one reader waited; `waits`: number of waits. `wrong_blocks`: received
        with a wrong digest. `joined`: were in flight already; `waited_for_others`: in flight in another process.
        """
        return {
            **self._reader.counts,
            **self._counts,
            **self._sources.statistics(),
            "blocked_s": self.waits.blocked_s,
            "waits": self.waits.count,
        }

    def histograms(self) -> dict[str, Any]:
        """Return how long readers waited, and requests to stores took, in this process."""
        return {"waits": self.waits.histogram.record(), "requests": self._reader.request_times.record()}

    async def aclose(self) -> None:
        """Free its resources once nothing is in flight. The caller closes the stores."""
        await aio.run_io(self.release_dedup_sources)

    def _late(self, number: int, failure: BootseerError | None, waited_s: float) -> BootseerError:
        """Return the error of a read that has reached its deadline."""
        if failure is not None and not failure.retryable:
            return failure
        if failure is not None:
            return StorageTimeout(f"block {number} did not come within {waited_s:.3g} s: {failure}")
        where = f"{self._sources.ordered()[0].store.url}/{self.index.pack_path(self.index.block(number).pack)}"
        return StorageTimeout(
            f"{where}: block {number} did not come within {waited_s:.3g} s:"
            " is the store, or the network to it, down?"
        )

    # ---- waiting until cached -----------------------------------------------------------------------------------

    async def _read(self, numbers: Iterable[int], want: BlockRequest) -> dict[int, memoryview]:
        assert want.raws is not None
        left = list(dict.fromkeys(numbers))
        for _ in range(ROUNDS):
            if len(left) <= _INLINE:
                self._read_kept(left, want.raws)
            else:
                await aio.run_io(self._read_kept, left, want.raws)
            left = [number for number in left if number not in want.raws]
            if not left:
                return want.raws
            await self._fetch_all(left, want)
        self._read_kept(left, want.raws)
        lost = [number for number in left if number not in want.raws]
        if lost:
            raise IntegrityError(f"block {lost[0]} of {self.cache.tree} is damaged as soon as it is cached")
        return want.raws

    def _read_kept(self, numbers: list[int], raws: dict[int, memoryview]) -> None:
        for number in numbers:
            if number not in raws:
                raw = self._recent.get(number)
                if raw is None:
                    raw = self.cache.try_read_block(number, self.index.block(number).raw_bytes)
                if raw is not None:
                    raws[number] = raw

    async def _fetch_all(self, numbers: list[int], want: BlockRequest) -> None:
        """Continue until each block is fetched or cached; the wait for a process without progress is short."""
        begin_s = time.monotonic()
        pause_s = POLL_S
        span_bytes = HOT_SPAN_BYTES if want.is_demand else COLD_SPAN_BYTES
        while numbers:
            spans = plan_spans(self.index, numbers, span_bytes=span_bytes, max_gap_bytes=self._max_gap_bytes)
            if len(spans) == 1:
                numbers = await self._fetch_span(spans[0], want)
            else:
                left = await aio.map_bounded(lambda span: self._fetch_span(span, want), spans, width=DEMAND_SPANS)
                numbers = [number for some in left for number in some]
            if not numbers:
                return
            if time.monotonic() - begin_s > self._patience_s:
                if not want.is_demand or want.is_alone:
                    return
                want.is_alone = True
            await asyncio.sleep(pause_s)
            pause_s = min(MAX_POLL_S, pause_s * 1.5)

    async def _fetch_span(self, span: Span, want: BlockRequest) -> list[int]:
        """Fetch the blocks that are not in flight, and wait for the others within the process.

        Returns: those that are still missing.
        """
        joined: list[InFlightBlock] = []
        left: list[int] = []
        memory = self._demand_memory if want.is_demand else self._prefetch_memory
        async with memory.lease() as buffer:
            in_flight = self._start(span, want, joined, left)
            try:
                if in_flight:
                    blocks = await self._copy_from_trees(
                        [flight.block for flight in in_flight.values()], in_flight, want
                    )
                    for part in self._replan(span, blocks):
                        view = buffer.view(part.offset, part.length)
                        await self._reader.read(part, view, in_flight, want)
            except BootseerError as error:
                for flight in in_flight.values():
                    flight.error = error if want.is_demand else None
                raise
            finally:
                for number, flight in in_flight.items():
                    self.cache.unlock(number)
                    if self._in_flight.get(number) is flight:
                        del self._in_flight[number]
                    flight.is_done.set()
        for flight in joined:
            if not await self._join(flight, want):
                left.append(flight.block.number)
        return left

    def _start(
        self, span: Span, want: BlockRequest, joined: list[InFlightBlock], left: list[int]
    ) -> dict[int, InFlightBlock]:
        """Decide which blocks this call fetches; return them, locked."""
        in_flight: dict[int, InFlightBlock] = {}
        for block in span.blocks:
            number = block.number
            flight = self._in_flight.get(number)
            if flight is not None and not want.is_alone:
                flight.is_wanted = flight.is_wanted or want.raws is not None
                joined.append(flight)
                self._counts["joined"] += 1
                continue
            if number in self._recent or (want.is_alone and self.cache.has(number)):
                continue
            is_locked = self.cache.try_lock(number)
            if not is_locked and not want.is_alone:
                self._counts["waited_for_others"] += 1
                if not self.cache.has(number):
                    left.append(number)
            elif is_locked and not want.is_alone and self.cache.settle(number):
                self.cache.unlock(number)
            else:
                in_flight[number] = InFlightBlock(block, is_wanted=want.raws is not None)
        self._in_flight.update(in_flight)
        return in_flight

    async def _join(self, flight: InFlightBlock, want: BlockRequest) -> bool:
        """Wait for an in-flight block; return False when it was not fetched."""
        try:
            async with asyncio.timeout(self._patience_s if want.is_demand else None):
                await flight.is_done.wait()
        except TimeoutError:
            return False
        if flight.error is not None and want.is_demand:
            raise type(flight.error)(str(flight.error)) from flight.error
        if flight.raw is not None and want.raws is not None:
            want.raws[flight.block.number] = flight.raw
            return True
        return self.cache.has(flight.block.number)

    # ---- from other trees --------------------------------------------------------------------------------------

    def _replan(self, span: Span, blocks: list[StoredBlock]) -> list[Span]:
        """Plan the spans for the blocks of a span that are still missing."""
        if len(blocks) == len(span.blocks):
            return [span]
        numbers = [block.number for block in blocks]
        return plan_spans(self.index, numbers, span_bytes=COLD_SPAN_BYTES, max_gap_bytes=self._max_gap_bytes)

    async def _copy_from_trees(
        self, blocks: list[StoredBlock], in_flight: dict[int, InFlightBlock], want: BlockRequest
    ) -> list[StoredBlock]:
        """Copy the blocks that other trees have. Returns: the remaining ones."""
        dedup_sources = self._dedup_sources
        if (
            dedup_sources is None
            or not dedup_sources.is_built
            or not any(dedup_sources.has(block.number) for block in blocks)
        ):
            return blocks
        raws: dict[int, memoryview] = {}
        refused: list[int] = []

        def copy() -> None:
            for block in blocks:
                raw = dedup_sources.try_read(block.number, block.raw_bytes)
                if raw is not None:
                    raws[block.number] = raw
                    if want.keeps and not self.cache.fill(block.number, raw):
                        refused.append(block.number)

        await aio.run_io(copy)
        self._deliver(raws, refused, in_flight, want)
        self._counts["donated_blocks"] += len(raws)
        return [block for block in blocks if block.number not in raws]

    def _deliver(
        self,
        raws: dict[int, memoryview],
        refused: list[int],
        in_flight: dict[int, InFlightBlock],
        want: BlockRequest,
    ) -> None:
        """Hand out received blocks; those that the cache refused stay in memory for a while."""
        for number, raw in raws.items():
            in_flight[number].raw = raw
            if want.raws is not None:
                want.raws[number] = raw
        for number in refused:
            self._recent[number] = raws[number]
            self._recent.move_to_end(number)
            while len(self._recent) > RECENT_BLOCKS:
                self._recent.popitem(last=False)
        if refused:
            self.release_dedup_sources()  # they use space
