"""Prefetching blocks: the hot ones as fast as the link allows, the others while no reader waits.

A prefetcher never fails a start: a block that it cannot fetch is fetched, or its error reported, when it is read.
It is cancelled as any task is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from enum import Enum

from bootseer import aio
from bootseer.backoff import Backoff
from bootseer.blocks.fetch import BlockFetcher
from bootseer.blocks.plan import NearDemand, plan_cold, plan_hot
from bootseer.blocks.spans import COLD_SPAN_BYTES, HOT_SPAN_BYTES, Span
from bootseer.errors import BootseerError, Unavailable
from bootseer.logs import get_logger
from bootseer.storage.engine.rate_limit import RateLimiter

_log = get_logger(__name__)

HOT_WIDTH = 16  # spans at once
NEAR_WIDTH = 6  # fewer, as those near a new demand queue behind them; not less, for stores that answer late
COLD_WIDTH = 4
QUIET_S = 0.25  # cold blocks wait until no reader has waited for so long
SAVE_S = 60.0  # between two saves of cold blocks
SAVE_TIMEOUT_S = 600.0
PAUSES = Backoff(1.0, 30.0)  # after a failure
MAX_FAILURES = 8  # in a row


class Phase(Enum):
    """What a prefetcher is doing."""

    NEW = "new"
    HOT = "hot"
    COLD = "cold"
    DONE = "done"
    GIVEN_UP = "given_up"  # no space, or a store that fails again and again
    CANCELLED = "cancelled"


class Prefetcher:
    """Fetch `hot` blocks in order, then, with `is_whole`, all others.

    `is_guess`: nobody knows the order of reads, so that the hot blocks near those of `note_demand` come first.
    `max_bytes_per_s`: of the cold ones, and with `limits_hot` of all. `log` receives a line when it gives up.
    """

    def __init__(
        self,
        fetcher: BlockFetcher,
        hot: Sequence[int] = (),
        *,
        is_whole: bool = False,
        is_guess: bool = False,
        max_bytes_per_s: float | None = None,
        hot_width: int = HOT_WIDTH,
        cold_width: int = COLD_WIDTH,
        quiet_s: float = QUIET_S,
        limits_hot: bool = False,
    ) -> None:
        self.phase = Phase.NEW
        self.is_guess = is_guess
        self._fetcher, self._hot, self._is_whole = fetcher, hot, is_whole
        self._near: NearDemand | None = None
        self._rate, self._limits_hot = RateLimiter(max_bytes_per_s), limits_hot
        self._hot_width, self._cold_width, self._quiet_s = hot_width, cold_width, quiet_s
        self._failures = 0  # in a row
        self._failed_spans = 0
        self._hot_s = 0.0
        self._saved_s = time.monotonic()

    async def run(self) -> None:
        """Run until all requested blocks are there, or it has given up."""
        cache, index = self._fetcher.cache, self._fetcher.index
        try:
            self.phase = Phase.HOT
            begin_s = time.monotonic()
            hot = await aio.run_io(cache.missing, self._hot)
            if len(hot) < len(self._hot):
                missing = set(hot)
                await aio.run_io(cache.read_ahead, [number for number in self._hot if number not in missing])
            span_bytes = self._rate.piece_bytes(HOT_SPAN_BYTES) if self._limits_hot else HOT_SPAN_BYTES
            spans: Iterable[Span]
            if self.is_guess:
                spans = self._near = NearDemand(index, hot, span_bytes=span_bytes)
                await aio.map_bounded(self._fetch_hot, spans, width=min(NEAR_WIDTH, self._hot_width))
            else:
                spans = plan_hot(index, hot, span_bytes=span_bytes)
                await aio.map_bounded(self._fetch_hot, spans, width=self._hot_width)
            self._hot_s = time.monotonic() - begin_s
            if self._is_whole and self.phase is Phase.HOT:
                self.phase = Phase.COLD
                await self._fetcher.waits.quiet(self._quiet_s)
                rest = await aio.run_io(cache.missing, range(index.block_count))
                cold = plan_cold(index, rest, span_bytes=self._rate.piece_bytes(COLD_SPAN_BYTES))
                await aio.map_bounded(self._fetch_cold, cold, width=self._cold_width)
            if self.phase is not Phase.GIVEN_UP:
                self.phase = Phase.DONE
        except asyncio.CancelledError:
            self.phase = Phase.CANCELLED
            raise
        if await aio.run_io(self._is_tree_whole):
            # Not earlier: reads and streams that follow take blocks from other trees as well. The fetcher releases
            # them when the cache refuses blocks (`BlockFetcher`), and at its end.
            self._fetcher.release_dedup_sources()
        await self._save()

    def note_demand(self, number: int) -> None:
        """Record that a reader waits for a block."""
        if self._near is not None:
            self._near.want(number)

    def statistics(self) -> dict[str, float | str]:
        """Return the phase, how long the hot blocks took, and how many spans failed."""
        return {"phase": self.phase.value, "hot_s": self._hot_s, "failed_spans": self._failed_spans}

    async def _fetch_hot(self, span: Span) -> None:
        if self._limits_hot:
            await self._wait_rate(span)
        await self._fetch(span)

    async def _fetch_cold(self, span: Span) -> None:
        if self.phase is Phase.GIVEN_UP:
            return
        await self._fetcher.waits.quiet(self._quiet_s)
        await self._wait_rate(span)
        await self._fetch(span)
        if time.monotonic() - self._saved_s > SAVE_S:
            self._saved_s = time.monotonic()
            await self._save()

    async def _wait_rate(self, span: Span) -> None:
        """Wait until the rate limiter allows the span."""
        if self.phase is not Phase.GIVEN_UP:
            await asyncio.sleep(self._rate.wait_s(span.length, time.monotonic()))

    def _is_tree_whole(self) -> bool:
        return not self._fetcher.cache.missing(range(self._fetcher.index.block_count))

    async def _save(self) -> None:
        try:
            await aio.run_abandonable(self._fetcher.cache.save, timeout_s=SAVE_TIMEOUT_S)
        except (TimeoutError, Unavailable):
            pass  # a disk that hangs: unsaved marks matter only after a power cut

    async def _fetch(self, span: Span) -> None:
        if self.phase is Phase.GIVEN_UP:
            return
        if self._fetcher.cache.full_reason:
            self._give_up(self._fetcher.cache.full_reason)
            return
        try:
            await self._fetcher.ensure(span.numbers)
            self._failures = 0
            return
        except BootseerError as error:
            self._failures += 1
            self._failed_spans += 1
            if self._failures >= MAX_FAILURES:
                self._give_up(str(error))
                return
        await asyncio.sleep(PAUSES.wait_s(self._failures))

    def _give_up(self, reason: str) -> None:
        if self.phase is not Phase.GIVEN_UP:
            self.phase = Phase.GIVEN_UP
            _log.info("blocks are not fetched ahead any more, only as they are read: %s", reason)
