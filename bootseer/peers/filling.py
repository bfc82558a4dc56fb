"""Fetching of ranges of spans from the store into the spool; concurrent requests share one read.

In: a held span, and a requested range. Out: pieces that can be sent on as soon as they arrive. A read continues
when its first requester leaves, as others may wait for it. Only requested ranges are read: a start that needs a
tenth of an image reads no more. The memory for pieces is bounded. For one event loop.
"""

from __future__ import annotations

import asyncio
from functools import partial

from bootseer import aio
from bootseer.errors import BootseerError, StorageError, Unavailable
from bootseer.peers.spans import SPAN_BYTES
from bootseer.peers.spool import Spool, SpooledSpan, SpoolFullError
from bootseer.storage import RangeReader, RangeRequest, Store
from bootseer.storage.engine.bounce import BouncePool
from bootseer.tuning import current

PIECE_BYTES = 1 << 20  # unit of reading, storing and sending
PIECES_AT_ONCE = 4  # of one range
TRIES = 2  # per piece; a waiting reader can use the store itself


class Filler:
    """A filler of one spool. Its tasks belong to `group`, and end with it."""

    def __init__(self, spool: Spool, group: asyncio.TaskGroup) -> None:
        self._spool, self._group = spool, group
        self._readers: dict[str, RangeReader] = {}  # by id of the store
        self._ranges = current().peers.ranges_at_once  # each uses at most SPAN_BYTES of memory
        self._memory = BouncePool(SPAN_BYTES, self._ranges)
        self._in_flight = 0

    def want(self, kept: SpooledSpan, store: Store, start: int, end: int) -> None:
        """Start to fetch what is neither present nor in flight. Offsets in the span, which the caller holds."""
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
                kept.sandboxes += 1
                self._in_flight += 1
                task = self._group.create_task(self._fetch(kept, reader, first, last))
                # Not in the task, which may be cancelled before its first step.
                task.add_done_callback(partial(self._end, kept, first, last))

    async def reach(self, kept: SpooledSpan, at: int, end: int) -> int:
        """Wait for the byte `at`. Return the end of the contiguous data after it, at most `end`.

        Raises: the error of the read.
        """
        while True:
            reached = min(end, kept.extents.reach(at))
            if reached > at:
                return reached
            if kept.coming.reach(at) == at:
                raise _again(kept.failure)
            await kept.wait_changed()

    def statistics(self) -> dict[str, int]:
        """Return statistics of reads of the stores; `flights`: ranges in flight."""
        totals = dict.fromkeys(("requests", "read_bytes", "retries"), 0)
        for reader in self._readers.values():
            found = reader.statistics()
            for name in totals:
                totals[name] += found[name]
        return {**{f"store_{name}": count for name, count in totals.items()}, "flights": self._in_flight}

    async def _fetch(self, kept: SpooledSpan, reader: RangeReader, start: int, end: int) -> None:
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
        except SpoolFullError as error:
            self._spool.shrink()
            kept.failure = error
        except BootseerError as error:
            kept.failure = error
        except Exception as error:  # no memory, for example: other reads continue
            kept.failure = StorageError(f"internal error: {type(error).__name__}: {error}")

    def _end(self, kept: SpooledSpan, start: int, end: int, _task: asyncio.Task[None]) -> None:
        self._in_flight -= 1
        if not self._in_flight:
            self._memory = BouncePool(SPAN_BYTES, self._ranges)  # an idle server has no buffers
        kept.coming.remove(start, end)
        kept.note()
        self._spool.release(kept)


def _next_piece(at: int) -> int:
    return (at // PIECE_BYTES + 1) * PIECE_BYTES


def _pieces(start: int, end: int) -> list[int]:
    """Return the starts of pieces: `start`, then multiples of the piece size."""
    return [start, *range(_next_piece(start), end, PIECE_BYTES)]


def _again(failure: Exception | None) -> Exception:
    """Return the failure as a new exception, for a further waiting reader."""
    if failure is None:
        return Unavailable("the read was cancelled")
    return type(failure)(str(failure))
