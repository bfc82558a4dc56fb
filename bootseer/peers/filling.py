"""Ranges of spans out of the store into the spool, each byte once, however many ask for it at the same time.

In: a span that is held, and the range that somebody wants. Out: it comes, piece after piece, and each piece can be
sent on as soon as it is there. What one has begun goes on when he goes away: others want it too. Only what is
asked for is read, so a start that needs a tenth of an image brings no more than that out of the store. The memory
that pieces pass through is bounded. For one event loop.
"""

from __future__ import annotations

import asyncio
from functools import partial

from bootseer import aio
from bootseer.errors import BootseerError, Unavailable
from bootseer.peers.spans import SPAN_BYTES
from bootseer.peers.spool import Kept, NoRoomError, Spool
from bootseer.storage import RangeReader, RangeRequest, Store
from bootseer.storage.bounce import BouncePool

PIECE_BYTES = 1 << 20  # read, kept and sent on as one
PIECES_AT_ONCE = 4  # of one range
RANGES_AT_ONCE = 32  # each has SPAN_BYTES of memory at most
TRIES = 2  # of a piece: whoever waits can go to the store itself


class Filler:
    """Its tasks belong to `group`, and end with it."""

    def __init__(self, spool: Spool, group: asyncio.TaskGroup) -> None:
        self._spool, self._group = spool, group
        self._readers: dict[str, RangeReader] = {}  # by id of the store
        self._memory = BouncePool(SPAN_BYTES, RANGES_AT_ONCE)
        self._flights = 0

    def want(self, kept: Kept, store: Store, start: int, end: int) -> None:
        """Has what is neither there nor on its way brought. Offsets in the span; the caller holds it."""
        name, _ = kept.key
        reader = self._readers.get(name.origin)
        if reader is None or reader.store is not store:
            reader = self._readers[name.origin] = RangeReader(
                store, piece_bytes=PIECE_BYTES, max_gap_bytes=0, tries=TRIES
            )
        for gap in kept.extents.missing(start, end):
            for first, last in kept.coming.missing(*gap):
                kept.coming.add(first, last)
                kept.failure = None
                kept.holders += 1
                self._flights += 1
                task = self._group.create_task(self._bring(kept, reader, first, last))
                # Not in the task: it may be cancelled before its first step.
                task.add_done_callback(partial(self._end, kept, first, last))

    async def reach(self, kept: Kept, at: int, end: int) -> int:
        """Waits until the byte `at` is there. Returns: up to where it is without a gap, at most `end`.

        Raises: what it failed by.
        """
        while True:
            reached = min(end, kept.extents.reach(at))
            if reached > at:
                return reached
            if kept.coming.reach(at) == at:
                raise _again(kept.failure)
            await kept.wait_changed()

    def statistics(self) -> dict[str, int]:
        """What was asked of the stores; `flights`: ranges on their way."""
        totals = dict.fromkeys(("requests", "read_bytes", "retries"), 0)
        for reader in self._readers.values():
            found = reader.statistics()
            for name in totals:
                totals[name] += found[name]
        return {**{f"store_{name}": count for name, count in totals.items()}, "flights": self._flights}

    async def _bring(self, kept: Kept, reader: RangeReader, start: int, end: int) -> None:
        name, span = kept.key
        base = span * SPAN_BYTES
        try:
            async with self._memory.lease() as buffer:
                view = buffer.view(base + start, end - start)

                async def bring(at: int) -> None:
                    stop = min(end, _next_piece(at))
                    part = view[at - start : stop - start]
                    await reader.read([RangeRequest(name.path, base + at, part, name.etag)])
                    await aio.run_io(self._spool.write, kept, at, part)
                    kept.extents.add(at, stop)
                    kept.note()

                await aio.map_bounded(bring, _pieces(start, end), width=PIECES_AT_ONCE)
        except NoRoomError as error:
            self._spool.shrink()
            kept.failure = error
        except BootseerError as error:
            kept.failure = error

    def _end(self, kept: Kept, start: int, end: int, _task: asyncio.Task[None]) -> None:
        self._flights -= 1
        if not self._flights:
            self._memory = BouncePool(SPAN_BYTES, RANGES_AT_ONCE)  # an idle server keeps none
        kept.coming.remove(start, end)
        kept.note()
        self._spool.release(kept)


def _next_piece(at: int) -> int:
    return (at // PIECE_BYTES + 1) * PIECE_BYTES


def _pieces(start: int, end: int) -> list[int]:
    """Where pieces begin: at `start`, then at multiples of the piece."""
    return [start, *range(_next_piece(start), end, PIECE_BYTES)]


def _again(failure: Exception | None) -> Exception:
    """The failure for one more who waits."""
    if failure is None:
        return Unavailable("what was on its way was given up")
    return type(failure)(str(failure))
