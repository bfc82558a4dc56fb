"""Blocks from stores into the cache: each once, whoever asks and however many, and verified before anyone sees it.

In: numbers of blocks. Out: they are in the cache, or in the caller's hands, or there is one error. A block that is
on its way is waited for, in this process and, by a lock that the kernel frees, in others; but nobody waits long
for somebody who makes no progress: the same block fetched twice does no harm. Demand goes before prefetch. The
memory that stored blocks come into is bounded, and so is what each may give. One fetcher belongs to one event
loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from bootseer import aio
from bootseer.blocks.carrier import TRIES, Carrier
from bootseer.blocks.donors import Donors
from bootseer.blocks.flights import Flight, Want
from bootseer.blocks.sources import Sources
from bootseer.blocks.spans import COLD_SPAN_BYTES, HOT_SPAN_BYTES, MAX_GAP_BYTES, Span, StoredBlock, plan_spans
from bootseer.blocks.tree_cache import TreeCache
from bootseer.blocks.waits import Waits
from bootseer.errors import BootseerError, IntegrityError, StorageTimeout
from bootseer.storage import Store
from bootseer.storage.bounce import BouncePool
from bootseer.tree.index import Index

DEADLINE_S = 30.0  # of a read that somebody waits for
AGAIN_S = 2.0  # of one whose block, or store, has failed for longer than that already
MOST_FAILING = 4096  # blocks of which it is remembered
PATIENCE_S = 5.0  # with another one that is fetching a block
POLL_S, MOST_POLL_S = 0.002, 0.05
FIRST_PAUSE_S, MOST_PAUSE_S = 0.1, 2.0  # of a reader who stands still, after a store has failed
ROUNDS = 3  # for a block that is damaged again as soon as it was brought
DEMAND_SPANS, PREFETCH_SPANS = 32, 16  # in memory at once
RECENT_BLOCKS = 256  # kept in memory while there is no room for them on disk
_INLINE = 2  # so many blocks are read from the cache without a thread
_COUNTS = ("donated_blocks", "joined", "waited_for_others")


class BlockFetcher:
    """Fills `cache` with blocks of `index` from `stores`, in this order; their root is the folder of the tree.

    `deadline_s`: a read that somebody waits for ends within it, and within `again_s` where its block or the store
    has failed for that long already. `waits`: what readers lost by blocks not yet there.
    """

    def __init__(
        self,
        index: Index,
        cache: TreeCache,
        stores: Sequence[Store],
        *,
        donors: Donors | None = None,
        deadline_s: float = DEADLINE_S,
        again_s: float = AGAIN_S,
        max_gap_bytes: int = MAX_GAP_BYTES,
    ) -> None:
        if cache.block_count != index.block_count:
            raise ValueError(f"a cache of {cache.block_count} blocks for a tree of {index.block_count}")
        self.index, self.cache = index, cache
        self.waits = Waits()
        self._sources = Sources(stores)
        self._donors = donors
        self._is_building = asyncio.Lock()
        self._deadline_s = deadline_s
        self._again_s = min(again_s, deadline_s)
        self._patience_s = min(PATIENCE_S, deadline_s / 4)
        self._max_gap_bytes = max_gap_bytes
        self._flights: dict[int, Flight] = {}
        self._recent: OrderedDict[int, memoryview] = OrderedDict()
        self._demand_memory = BouncePool(HOT_SPAN_BYTES, DEMAND_SPANS)
        self._prefetch_memory = BouncePool(COLD_SPAN_BYTES, PREFETCH_SPANS)
        self._carrier = Carrier(index, cache, self._sources, self._land)
        self._counts = dict.fromkeys(_COUNTS, 0)
        self._failing_s: dict[int, float] = {}  # since when a block cannot be had
        self._down_s: float | None = None  # since when nothing that somebody waits for can be had

    async def prepare(self) -> None:
        """Finds out what other trees can give. All but readers who stand still wait for it; done once."""
        async with self._is_building:
            if self._donors is not None and not self._donors.is_built:
                await aio.run_io(self._donors.build)

    async def ensure(self, numbers: Iterable[int], *, is_demand: bool = False) -> None:
        """Brings blocks into the cache; those that another process is fetching and does not bring are left to it.

        Raises: StorageError, IntegrityError naming the block, the pack and the store.
        """
        await self.prepare()
        await self._obtain(self.cache.missing(numbers), Want(is_demand=is_demand))

    async def read(self, numbers: Iterable[int], *, keeps: bool = True) -> dict[int, memoryview]:
        """The raw bytes of blocks, from the cache or a store; with `keeps` they are in the cache then.

        Raises: StorageError, IntegrityError.
        """
        await self.prepare()
        return await self._read(numbers, Want(is_demand=True, raws={}, keeps=keeps))

    async def read_now(self, numbers: Iterable[int], *, since_s: float | None = None) -> dict[int, memoryview]:
        """The same for a reader who stands still, since `since_s` (`time.monotonic`).

        Errors are waited out until the deadline, wrong bytes and refusals too: an error would end the program that
        reads, and by then a store may be mended or another one have the block. What has failed for so long is not
        waited for again: a program that goes on after an error would stand still at each of its reads.

        Raises: StorageTimeout at the deadline, or the StorageError or IntegrityError that waiting does not mend.
        """
        wanted = list(numbers)
        begin_s = time.monotonic() if since_s is None else since_s
        end_s = self._end_s(wanted, begin_s)
        failure: BootseerError | None = None
        with self.waits.one(since_s):
            for pause_s in _pauses_s():
                try:
                    # A scope for each try: Python 3.11 lets none expire that was open when a TaskGroup failed.
                    async with asyncio.timeout(max(0.0, end_s - time.monotonic())):
                        want = Want(is_demand=True, raws={}, try_s=self._deadline_s / (TRIES + 1))
                        found = await self._read(wanted, want)
                    self._down_s = None
                    for number in wanted:
                        self._failing_s.pop(number, None)
                    return found
                except TimeoutError:
                    pass  # of the last try
                except BootseerError as error:
                    failure = error
                self._note_failing(wanted, begin_s, is_wrong=isinstance(failure, IntegrityError))
                left_s = end_s - time.monotonic()
                if left_s <= 0:
                    try:
                        raise self._late(wanted[0], failure, time.monotonic() - begin_s)
                    finally:
                        del failure  # it holds this frame
                await asyncio.sleep(min(pause_s, left_s))
        raise AssertionError("pauses do not end")

    def _end_s(self, wanted: Iterable[int], begin_s: float) -> float:
        """Until when a read that has begun then is tried."""
        since_s = [self._failing_s[number] for number in wanted if number in self._failing_s]
        if self._down_s is not None:
            since_s.append(self._down_s)
        return max(begin_s + self._again_s, min(since_s, default=begin_s) + self._deadline_s)

    def _note_failing(self, wanted: Iterable[int], begin_s: float, *, is_wrong: bool) -> None:
        """`is_wrong`: bytes came, so the store is there."""
        if len(self._failing_s) > MOST_FAILING:
            self._failing_s.clear()
        for number in wanted:
            self._failing_s.setdefault(number, begin_s)
        if self._down_s is None and not is_wrong:
            self._down_s = time.monotonic()

    def release_donors(self) -> None:
        """Takes no more blocks from other trees, so that they can be evicted."""
        if self._donors is not None:
            donors, self._donors = self._donors, None
            donors.close()

    def statistics(self) -> dict[str, float]:
        """Since it was made: blocks by how they came, what the stores were asked, and how long readers waited.

        `blocked_s`: time in which at least one reader waited; `waits`: how often one did. `wrong_blocks`: came
        with other bytes than the index says. `joined`: were on their way already; `waited_for_others`: in another
        process.
        """
        return {
            **self._carrier.counts,
            **self._counts,
            **self._sources.statistics(),
            "blocked_s": self.waits.blocked_s,
            "waits": self.waits.count,
        }

    async def aclose(self) -> None:
        """When nothing is on its way any more: frees what it holds. The stores are their owner's."""
        await aio.run_io(self.release_donors)

    def _late(self, number: int, failure: BootseerError | None, waited_s: float) -> BootseerError:
        """What a read ends with that was tried for so long."""
        if failure is not None and not failure.retryable:
            return failure
        if failure is not None:
            return StorageTimeout(f"block {number} did not come within {waited_s:.3g} s: {failure}")
        where = f"{self._sources.ordered()[0].store.url}/{self.index.pack_path(self.index.block(number).pack)}"
        return StorageTimeout(
            f"{where}: block {number} did not come within {waited_s:.3g} s:"
            " is the store, or the network to it, down?"
        )

    # ---- until it is there -----------------------------------------------------------------------------------

    async def _read(self, numbers: Iterable[int], want: Want) -> dict[int, memoryview]:
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
            await self._obtain(left, want)
        self._read_kept(left, want.raws)
        lost = [number for number in left if number not in want.raws]
        if lost:
            raise IntegrityError(f"block {lost[0]} of {self.cache.tree} is lost as soon as it is in the cache")
        return want.raws

    def _read_kept(self, numbers: list[int], raws: dict[int, memoryview]) -> None:
        for number in numbers:
            if number not in raws:
                raw = self._recent.get(number)
                if raw is None:
                    raw = self.cache.try_read_block(number, self.index.block(number).raw_bytes)
                if raw is not None:
                    raws[number] = raw

    async def _obtain(self, numbers: list[int], want: Want) -> None:
        """Goes on until each was brought by us or is there; whoever makes no progress is not waited for long."""
        begin_s = time.monotonic()
        pause_s = POLL_S
        span_bytes = HOT_SPAN_BYTES if want.is_demand else COLD_SPAN_BYTES
        while numbers:
            spans = plan_spans(self.index, numbers, span_bytes=span_bytes, max_gap_bytes=self._max_gap_bytes)
            if len(spans) == 1:
                numbers = await self._bring(spans[0], want)
            else:
                left = await aio.map_bounded(lambda span: self._bring(span, want), spans, width=DEMAND_SPANS)
                numbers = [number for some in left for number in some]
            if not numbers:
                return
            if time.monotonic() - begin_s > self._patience_s:
                if not want.is_demand or want.is_alone:
                    return
                want.is_alone = True
            await asyncio.sleep(pause_s)
            pause_s = min(MOST_POLL_S, pause_s * 1.5)

    async def _bring(self, span: Span, want: Want) -> list[int]:
        """Brings what nobody else is bringing, and waits for the rest within the process.

        Returns: those that are not there then.
        """
        joined: list[Flight] = []
        left: list[int] = []
        memory = self._demand_memory if want.is_demand else self._prefetch_memory
        async with memory.lease() as buffer:
            flights = self._start(span, want, joined, left)
            try:
                if flights:
                    blocks = await self._take_donated([flight.block for flight in flights.values()], flights, want)
                    for part in self._replan(span, blocks):
                        view = buffer.view(part.offset, part.length)
                        await self._carrier.carry(part, view, flights, want)
            except BootseerError as error:
                for flight in flights.values():
                    flight.error = error if want.is_demand else None
                raise
            finally:
                for number, flight in flights.items():
                    self.cache.unlock(number)
                    if self._flights.get(number) is flight:
                        del self._flights[number]
                    flight.is_done.set()
        for flight in joined:
            if not await self._join(flight, want):
                left.append(flight.block.number)
        return left

    def _start(self, span: Span, want: Want, joined: list[Flight], left: list[int]) -> dict[int, Flight]:
        """Decides who brings each block: those of the result are ours, and locked."""
        flights: dict[int, Flight] = {}
        for block in span.blocks:
            number = block.number
            flight = self._flights.get(number)
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
                flights[number] = Flight(block, is_wanted=want.raws is not None)
        self._flights.update(flights)
        return flights

    async def _join(self, flight: Flight, want: Want) -> bool:
        """Waits for a block that is on its way; False when it did not come."""
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

    # ---- helped by others ------------------------------------------------------------------------------------

    def _replan(self, span: Span, blocks: list[StoredBlock]) -> list[Span]:
        """What is still to be read of a span."""
        if len(blocks) == len(span.blocks):
            return [span]
        numbers = [block.number for block in blocks]
        return plan_spans(self.index, numbers, span_bytes=COLD_SPAN_BYTES, max_gap_bytes=self._max_gap_bytes)

    async def _take_donated(
        self, blocks: list[StoredBlock], flights: dict[int, Flight], want: Want
    ) -> list[StoredBlock]:
        """Copies what other trees have. Returns: the others."""
        donors = self._donors
        if donors is None or not donors.is_built or not any(donors.has(block.number) for block in blocks):
            return blocks
        raws: dict[int, memoryview] = {}
        refused: list[int] = []

        def copy() -> None:
            for block in blocks:
                raw = donors.try_read(block.number, block.raw_bytes)
                if raw is not None:
                    raws[block.number] = raw
                    if want.keeps and not self.cache.fill(block.number, raw):
                        refused.append(block.number)

        await aio.run_io(copy)
        self._land(raws, refused, flights, want)
        self._counts["donated_blocks"] += len(raws)
        return [block for block in blocks if block.number not in raws]

    def _land(
        self, raws: dict[int, memoryview], refused: list[int], flights: dict[int, Flight], want: Want
    ) -> None:
        """Hands out what has come; what the cache has no room for stays in memory for a while."""
        for number, raw in raws.items():
            flights[number].raw = raw
            if want.raws is not None:
                want.raws[number] = raw
        for number in refused:
            self._recent[number] = raws[number]
            self._recent.move_to_end(number)
            while len(self._recent) > RECENT_BLOCKS:
                self._recent.popitem(last=False)
        if refused:
            self.release_donors()  # they hold room


def _pauses_s() -> Iterator[float]:
    """Between tries of what fails: random, up to twice as long each time."""
    most_s = FIRST_PAUSE_S
    while True:
        yield random.random() * most_s  # noqa: S311
        most_s = min(MOST_PAUSE_S, 2 * most_s)
