"""Concurrent reads of many ranges of a store, each into its caller's memory: the engine above `Store`.

In: ranges with their targets. Out: all targets full; or one error, after which nothing writes to them. The number
of in-flight reads follows the measured throughput (pace). Neighbours are read together (coalesce). Each read has a
deadline; failed ones continue from their last byte after a random wait. A straggler gets a hedged read by another
route (hedge) into a buffer. Demand precedes prefetch. One reader belongs to one event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from bootseer import aio
from bootseer import jitter as own
from bootseer.errors import BootseerError, StorageError, StorageTimeout, Unavailable
from bootseer.storage.engine.bounce import BouncePool, Buffer
from bootseer.storage.engine.coalesce import MAX_GAP_BYTES, PIECE_BYTES, PlannedRead, WantedRange, plan_pieces
from bootseer.storage.engine.concurrency_limit import START_WIDTH, ConcurrencyLimit, backoff_s
from bootseer.storage.engine.gate import ReadSemaphore
from bootseer.storage.engine.hedge import ReadDurations, may_hedge
from bootseer.storage.protocol import Store
from bootseer.tuning import current

TRIES = 4  # in a row without data
MAX_CALLS = 8  # times as many calls, even with some data each
STRAGGLER_CHECK_S = 0.1  # between checks for stragglers
LOOK_AHEAD = 32  # pieces among which the file with the fewest in-flight reads is preferred
COALESCING_BUFFERS = 8
HEDGING_BUFFERS = 4
COUNTS = ("requests", "read_bytes", "retries", "timeouts", "hedges", "hedge_wins", "coalesced", "wasted_bytes")

OnPiece = Callable[[int, int, int], None]  # index of a request, offset from its start, length: valid in the target


class RangeRequest(NamedTuple):
    """Bytes of a file and their target memory."""

    path: str
    offset: int  # bytes
    target: memoryview  # bytes, writable, contiguous; its length is that of the range
    etag: str = ""  # the only accepted version; without it, bytes may be of several versions


class RangeReader:
    """Reads ranges of one store. Concurrent `read` calls share its width and its statistics.

    `hedges`: whether stragglers get a second read; by default, where the store has another route to the bytes.
    `jitter` returns numbers from 0 to 1.
    """

    def __init__(
        self,
        store: Store,
        *,
        pace: ConcurrencyLimit | None = None,
        piece_bytes: int = PIECE_BYTES,
        max_gap_bytes: int = MAX_GAP_BYTES,
        tries: int = TRIES,
        hedges: bool | None = None,
        jitter: Callable[[], float] = own.jitter,
    ) -> None:
        if piece_bytes < 1 or tries < 1:
            raise ValueError(f"piece_bytes {piece_bytes} and tries {tries} must be at least 1")
        self.store = store
        if pace is None:
            most = current().storage.max_requests
            pace = ConcurrencyLimit(min(START_WIDTH, most), most)
        self._pace = pace
        self._piece_bytes, self._max_gap_bytes, self._tries = piece_bytes, max_gap_bytes, tries
        self._hedges = store.features.has_replicas if hedges is None else hedges
        self._jitter = jitter
        self._gate = ReadSemaphore(lambda: self._pace.width)
        self._patience = ReadDurations()
        self._coalescing = BouncePool(piece_bytes, COALESCING_BUFFERS)
        self._hedging = BouncePool(piece_bytes, HEDGING_BUFFERS)
        self._counts = dict.fromkeys(COUNTS, 0)

    async def read(
        self,
        requests: Sequence[RangeRequest],
        *,
        is_demand: bool = True,
        on_piece: OnPiece | None = None,
        attempt: int = 0,
    ) -> None:
        """Fill all targets. Raises the first error; after an error or a cancellation, nothing writes to a target.

        Targets must not overlap. `on_piece` is called when bytes are valid in their target, once for each byte.
        `attempt` > 0 requests another route to the bytes, after wrong ones.
        """
        pieces = plan_pieces(
            [_check(request) for request in requests],
            piece_bytes=self._piece_bytes,
            max_gap_bytes=self._max_gap_bytes,
        )
        if not pieces:
            return
        job = _Job(requests, pieces, on_piece, attempt)
        self._gate.announce(len(pieces), is_demand=is_demand)
        try:
            async with aio.TaskGroup() as group:
                watcher = group.create_task(self._watch(job, group))
                while job.pending:
                    await self._gate.enter(is_demand=is_demand)
                    flight = job.take()
                    task = group.create_task(self._fetch(job, flight))
                    # Not in the task: it may be cancelled before its first step.
                    task.add_done_callback(partial(self._leave, job, flight))
                await job.is_done.wait()
                watcher.cancel()
        finally:
            self._gate.withdraw(len(job.pending), is_demand=is_demand)

    def statistics(self) -> dict[str, int]:
        """Return counts since the start, and the current width.

        `requests`: reads of the store. `coalesced`: ranges that shared a read. `wasted_bytes`: upper limit of the
        bytes read in vain: in gaps, by losers of hedges, by reads that hit their deadline.
        """
        return {**self._counts, "width": self._pace.width, "in_flight": self._gate.in_use + self._gate.lent}

    # ---- one piece -----------------------------------------------------------------------------------------

    async def _fetch(self, job: _Job, flight: _InFlightPiece) -> None:
        piece = flight.piece
        if piece.is_direct:
            part = piece.parts[0]
            target = job.requests[part.request].target
            await self._fill(flight, target[part.request_offset : part.request_offset + part.length])
        else:
            async with self._coalescing.lease() as buffer:
                view = buffer.view(piece.offset, piece.length)
                await self._fill(flight, view)
                for part in piece.parts:
                    target = job.requests[part.request].target
                    target[part.request_offset : part.request_offset + part.length] = view[
                        part.piece_offset : part.piece_offset + part.length
                    ]
            self._counts["coalesced"] += len(piece.parts)
            self._counts["wasted_bytes"] += piece.gap_bytes
        self._counts["read_bytes"] += piece.length
        self._pace.done(flight.started_s, _now_s(), piece.length, is_full=self._gate.is_wanted)
        job.land(piece)

    def _leave(self, job: _Job, flight: _InFlightPiece, _task: asyncio.Task[None]) -> None:
        del job.reads[flight]
        job.in_flight[flight.piece.path] -= 1
        self._gate.leave(is_lent=flight.is_lent)

    async def _fill(self, flight: _InFlightPiece, target: memoryview) -> None:
        """Read until `target` is full, in as many calls as needed and allowed."""
        in_a_row = 0
        while True:
            before = flight.have
            try:
                await self._call(flight, target)
                return
            except StorageError as error:
                if not error.retryable:
                    raise
                in_a_row = 1 if flight.have > before else in_a_row + 1
                if in_a_row >= self._tries or flight.calls >= self._tries * MAX_CALLS:
                    kind = StorageTimeout if isinstance(error, StorageTimeout) else Unavailable
                    raise kind(f"{error} (given up after {flight.calls} tries)") from error
                self._counts["retries"] += 1
                wait_s = backoff_s(in_a_row, self._jitter(), error.retry_after_s)
            await asyncio.sleep(wait_s)

    async def _call(self, flight: _InFlightPiece, target: memoryview) -> None:
        """Make one call for all missing bytes; a hedge may be faster. Raises the call's error."""
        piece, offset = flight.piece, flight.piece.offset + flight.have
        rest = target[flight.have :]
        flight.begin(_now_s(), rest)
        attempt = flight.take_attempt()
        self._counts["requests"] += 1
        failure: StorageError | None = None
        is_late = False
        try:
            async with asyncio.timeout(self._patience.deadline_s(len(rest), flight.timeouts)) as flight.scope:
                await self.store.read_into(piece.path, offset, rest, etag=piece.etag, attempt=attempt)
            flight.is_filled = True
        except TimeoutError as error:
            is_late = True
            failure = StorageTimeout(
                f"{self.store.url}: bytes {offset} to {offset + len(rest)} of {piece.path!r} did not arrive"
                f" within {_now_s() - flight.started_s:.1f} s"
            )
            failure.__cause__ = error
        except StorageError as error:
            if not error.retryable:
                raise
            failure = error
        finally:
            flight.end()
        if flight.hedge is not None:
            if flight.is_filled:
                flight.hedge.cancel()  # it writes only to its own memory
            else:
                await asyncio.wait({flight.hedge})
        if flight.is_filled:  # only successes count: a hanging read must not raise the deadlines
            self._patience.took(len(rest), _now_s() - flight.started_s)
        if flight.is_filled or flight.is_hedge_won:
            flight.have = len(target)
            return
        assert failure is not None
        flight.have += min(max(0, failure.read_bytes), len(rest))
        self._pace.failed(flight.started_s, _now_s())
        if is_late:
            flight.timeouts += 1
            self._counts["timeouts"] += 1
            self._counts["wasted_bytes"] += len(rest)
        if flight.have == len(target):
            return  # all bytes arrived before it failed
        try:
            raise failure
        finally:
            del failure  # it holds this frame, which holds the target

    # ---- stragglers ----------------------------------------------------------------------------------------

    async def _watch(self, job: _Job, group: asyncio.TaskGroup) -> None:
        """Update deadlines; let overdue reads lend their place, and send hedges for them."""
        while True:
            await asyncio.sleep(STRAGGLER_CHECK_S)
            now_s = _now_s()
            overdue = []
            for flight in job.reads:
                if flight.scope is None:
                    continue  # it waits for memory or for its next try
                length = len(flight.rest)
                flight.set_deadline(flight.started_s + self._patience.deadline_s(length, flight.timeouts))
                if now_s - flight.started_s >= self._patience.overdue_s(length):
                    overdue.append(flight)
            for flight in overdue:
                # Before durations are known, lending would load a slow store even more.
                if not flight.is_lent and self._patience.p95_s(len(flight.rest)) is not None:
                    flight.is_lent = self._gate.try_lend()
            in_flight = self._gate.in_use - sum(not flight.is_lent for flight in overdue)
            for flight in overdue if self._hedges else ():
                if flight.hedge is None and may_hedge(
                    pieces=job.pieces, done=job.done, hedges=job.hedges, in_flight=in_flight
                ):
                    buffer = self._hedging.try_take()
                    if buffer is not None:
                        self._send_hedge(job, flight, buffer, group)

    def _send_hedge(self, job: _Job, flight: _InFlightPiece, buffer: Buffer, group: asyncio.TaskGroup) -> None:
        job.hedges += 1
        self._counts["hedges"] += 1
        self._counts["requests"] += 1
        self._counts["wasted_bytes"] += len(flight.rest)  # of one of the two
        flight.hedge = group.create_task(self._hedge(flight, buffer))
        flight.hedge.add_done_callback(lambda _: self._hedging.give_back(buffer))

    async def _hedge(self, flight: _InFlightPiece, buffer: Buffer) -> None:
        """Read the same bytes by another route. Writes to the target only after the first read has failed."""
        rest, piece = flight.rest, flight.piece
        offset = piece.offset + flight.have
        view = buffer.view(offset, len(rest))
        try:
            async with asyncio.timeout(self._patience.deadline_s(len(rest), flight.timeouts)):
                await self.store.read_into(
                    piece.path, offset, view, etag=piece.etag, attempt=flight.take_attempt()
                )
        except (BootseerError, TimeoutError):
            return  # the first read, or its next try, reports the error
        flight.stop()
        await flight.is_over.wait()
        assert not flight.is_filled, "a call that reads everything cancels its hedge"
        rest[:] = view
        flight.is_hedge_won = True
        self._counts["hedge_wins"] += 1


class _InFlightPiece:
    """A piece that is being read."""

    def __init__(self, piece: PlannedRead, first_attempt: int) -> None:
        self.piece = piece
        self.have = 0  # valid bytes from its start
        self.calls = 0  # started
        self.timeouts = 0  # calls that hit their deadline
        self.is_lent = False  # its place at the gate
        self.is_filled = False  # by a call of its own
        self.is_hedge_won = False
        self.hedge: asyncio.Task[None] | None = None
        self.scope: asyncio.Timeout | None = None  # of the current call
        self.is_over = asyncio.Event()  # the call has ended
        self._next_attempt = first_attempt

    def take_attempt(self) -> int:
        """Return the next route to the bytes; each is used once."""
        self._next_attempt += 1
        return self._next_attempt - 1

    def begin(self, now_s: float, rest: memoryview) -> None:
        """Begin a call for `rest`."""
        self.calls += 1
        self.started_s = now_s
        self.rest = rest
        self.hedge = None
        self.is_over.clear()

    def set_deadline(self, end_s: float) -> None:
        """Set the end of the current call, unless its deadline has passed."""
        if self.scope is not None and not self.scope.expired() and self.scope.when() != end_s:
            self.scope.reschedule(end_s)

    def stop(self) -> None:
        """End the current call."""
        self.set_deadline(_now_s())
        self.scope = None

    def end(self) -> None:
        """Record that the call has ended and writes nothing any more."""
        self.scope = None
        self.is_over.set()


class _Job:
    """The work of one `read`."""

    def __init__(
        self, requests: Sequence[RangeRequest], pieces: list[PlannedRead], on_piece: OnPiece | None, attempt: int
    ) -> None:
        self.requests = requests
        self.pending = deque(pieces)
        self.pieces = len(pieces)
        self.done = self.hedges = 0
        self.reads: dict[_InFlightPiece, None] = {}  # oldest first
        self.in_flight: dict[str, int] = {}  # pieces, by path
        self.is_done = asyncio.Event()
        self._on_piece = on_piece
        self._attempt = attempt

    def take(self) -> _InFlightPiece:
        """Take a piece: among the first ones, of the file with the fewest in-flight reads, to use all servers."""
        best, fewest = 0, self.in_flight.get(self.pending[0].path, 0)
        for place in range(1, min(LOOK_AHEAD, len(self.pending)) if fewest else 1):
            count = self.in_flight.get(self.pending[place].path, 0)
            if count < fewest:
                best, fewest = place, count
                if not count:
                    break
        piece = self.pending[best]
        del self.pending[best]
        self.in_flight[piece.path] = fewest + 1
        flight = _InFlightPiece(piece, self._attempt)
        self.reads[flight] = None
        return flight

    def land(self, piece: PlannedRead) -> None:
        """Record that a piece is valid in its targets."""
        self.done += 1
        if self._on_piece is not None:
            for part in piece.parts:
                self._on_piece(part.request, part.request_offset, part.length)
        if self.done == self.pieces:
            self.is_done.set()


def _check(request: RangeRequest) -> WantedRange:
    target = request.target
    if target.readonly or target.format != "B" or target.ndim != 1 or not target.c_contiguous:
        raise ValueError(f"target for {request.path!r} must be writable, contiguous bytes")
    if request.offset < 0:
        raise ValueError(f"offset {request.offset} of {request.path!r} is negative")
    return WantedRange(request.path, request.etag, request.offset, len(target))


def _now_s() -> float:
    return asyncio.get_running_loop().time()
