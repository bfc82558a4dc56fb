"""Sends the events of this node to the coordinator as they are written, within limits.

In: the paths of event files; the coordinator's request for events. Out: batches of lines over the connection to
it. The files are the backlog: they are read only after earlier lines were sent. So memory stays bounded, ranks
never wait, and events of dead ranks are sent too. event_batch.py decides which lines are sent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from bootseer.tuning import current
from launcher.agent.event_files import EventFile
from launcher.base.loop import Alarm, EventLoop
from launcher.rendezvous.clock import UNKNOWN_NS
from launcher.rendezvous.event_batch import DropCounts, EventRateLimits, pack
from launcher.rendezvous.messages import EventBatch, EventsDropped

PERIOD_S = 1.0  # between two reads of the files
PERIOD_NODES = 500  # with more nodes the period grows: the coordinator receives no more at once
AGAIN_S = 0.05  # while there are more lines
LAST_S = 1.0  # for the last events at the end of the job
_LAST_AGAIN_S = 0.01
ROUND_BYTES = 1024 * 1024  # read before other callbacks get a turn
LAST_ROUNDS = 8
_KEPT_BEHIND_BYTES = 1024 * 1024
_SKIP_BYTES = 16 * 1024 * 1024  # in one round
REPORT_DROPS_S = 10.0  # if there is no line to send them with


class EventLink(Protocol):
    """The part of the connection to the coordinator that sends events."""

    @property
    def can_ship(self) -> bool:
        """Whether all earlier data has arrived, so that no urgent message would wait for a batch."""

    def ship(self, batch: EventBatch) -> None:
        """Send a batch."""

    def end_shipping(self) -> None:
        """Finish: no more batches follow."""

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        """See Link."""


class State(Enum):
    AT_WORK = "at work"
    LAST = "last"  # the job is over, or this node leaves: the last events are sent
    OVER = "over"


class Shipper:
    """See the module's docstring; exists once the coordinator requests events."""

    def __init__(self, loop: EventLoop, way: EventLink, own: EventFile, nodes: int) -> None:
        """Args: own: the event file of this node's bootrun; nodes: the maximum number of nodes."""
        self._loop = loop
        self._way = way
        self._files = [own]
        self._drops = DropCounts()
        self._reported = EventsDropped(0, 0, 0, 0)
        self._reported_s = loop.time()
        self._sieve = EventRateLimits(nodes, self._drops, loop.time())
        self._waiting: list[bytes] = []
        self._alarm = Alarm(loop)
        self._due_s = 0.0
        self._rounds_left = LAST_ROUNDS
        self._until_s = 0.0  # of the last events
        self._state = State.AT_WORK
        self._batches = self._lines = self._bytes = 0
        self._max_behind_bytes = current().launcher.event_backlog_bytes  # of one file
        self._set_nodes(nodes)
        self._plan(self._period_s * _random())

    def _set_nodes(self, nodes: int) -> None:
        self._period_s = PERIOD_S * max(1.0, nodes / PERIOD_NODES)
        self._sieve.set_nodes(nodes)

    def follow(self, paths: Iterable[str], nodes: int) -> None:
        """Read the files of an attempt's ranks, and finish those of the last one. Args: nodes: of the attempt."""
        if self._state is not State.AT_WORK:
            return
        for file in self._files[1:]:
            file.is_ended = True
        self._files += [EventFile(path) for path in paths]
        self._set_nodes(nodes)

    def hurry(self) -> None:
        """Read the files a little sooner, as a process has ended."""
        soon_s = self._period_s * (0.05 + 0.1 * _random())
        if self._state is State.AT_WORK and self._loop.time() + soon_s < self._due_s:
            self._plan(soon_s)

    def flush(self) -> None:
        """Send as much as possible at once; for a node that leaves."""
        if self._state is State.AT_WORK:
            self._state = State.LAST
            self._send_last()
            self._waiting.clear()
            self.close()

    def finish(self) -> None:
        """Send all events at once at the end of the job; `end` sends those that this node still writes."""
        if self._state is State.AT_WORK:
            self._state = State.LAST
            self._until_s = self._loop.time() + LAST_S
            self._send_rounds()
            self._alarm.set(LAST_S, self.end)

    def end(self) -> None:
        """Send the last events: this node writes no more."""
        if self._state is State.LAST:
            self._finish_some()
        else:
            self.flush()

    def close(self) -> None:
        """Stop reading the files."""
        self._state = State.OVER
        self._alarm.cancel()

    def statistics(self) -> dict[str, int]:
        """Return counters for the tests."""
        return {
            "files": len(self._files),
            "batches": self._batches,
            "lines": self._lines,
            "bytes": self._bytes,
            "waiting": len(self._waiting),
            **{f"dropped_{name}": count for name, count in self._drops.told()._asdict().items()},
        }

    # ---- while the job runs ----------------------------------------------------------------------------------

    def _plan(self, delay_s: float) -> None:
        self._due_s = self._loop.time() + delay_s
        self._alarm.set(delay_s, self._on_time)

    def _on_time(self) -> None:
        has_more = self._round()
        # Not in step with the other nodes.
        self._plan(AGAIN_S if has_more else self._period_s * (0.95 + 0.1 * _random()))

    def _round(self) -> bool:
        """Send waiting lines, then read and send the next ones; return whether there is more to do at once."""
        self._send()
        if self._waiting:
            return True
        now_s = self._loop.time()
        if not self._sieve.has_room(now_s):
            return False
        has_more = self._read(now_s)
        self._send()
        return has_more or bool(self._waiting)

    def _read(self, now_s: float) -> bool:
        """Read the next lines of all files in turn; return whether some are left for the next round."""
        has_skipped = self._skip_oldest()
        left_bytes = ROUND_BYTES
        progress = True
        while progress and left_bytes > 0:
            progress = False
            for file in list(self._files):
                lines, taken = file.take(self._drops) if file.behind() else ([], 0)
                self._waiting += self._sieve.select_lines(lines, now_s)
                left_bytes -= taken
                progress = progress or taken > 0
                if file.is_ended and not taken:
                    file.end(self._drops)
                    self._files.remove(file)
                if left_bytes <= 0:
                    break
        is_full = left_bytes <= 0
        if is_full:
            self._files[1:] = [*self._files[2:], *self._files[1:2]]  # another file is first in the next round
        return is_full or has_skipped

    def _skip_oldest(self) -> bool:
        """Skip and count the oldest part of one file that has grown too fast; return whether there is one."""
        for file in self._files:
            behind = file.behind()
            if behind > self._max_behind_bytes:
                file.skip(min(behind - _KEPT_BEHIND_BYTES, _SKIP_BYTES), self._drops)
                return True
        return False

    def _send(self) -> None:
        now_ns = time.monotonic_ns()
        job_ns, error_ns = self._way.to_job_clock(now_ns)
        is_last = self._state is State.LAST
        if error_ns >= UNKNOWN_NS and not is_last:
            return  # the first answer to a heartbeat arrives soon
        while self._waiting and self._way.can_ship:
            packed = pack(self._waiting)
            del self._waiting[: packed.lines]
            self._ship(EventBatch(*packed, now_ns, job_ns, error_ns, self._drops.told()))
        is_due = is_last or self._loop.time() - self._reported_s >= REPORT_DROPS_S
        if is_due and self._drops.told() != self._reported and self._way.can_ship:
            self._ship(EventBatch(b"", 0, 0, now_ns, job_ns, error_ns, self._drops.told()))

    def _ship(self, batch: EventBatch) -> None:
        self._reported, self._reported_s = batch.dropped, self._loop.time()
        self._batches += 1
        self._lines += batch.lines
        self._bytes += len(batch.data)
        self._way.ship(batch)

    # ---- the end ---------------------------------------------------------------------------------------------

    def _finish_some(self) -> None:
        is_done = self._send_last()
        if is_done or self._loop.time() >= self._until_s:
            self.close()
            self._way.end_shipping()
        else:
            self._alarm.set(_LAST_AGAIN_S, self._finish_some)

    def _send_last(self) -> bool:
        """Send as much as possible now, at the end only counts; return whether that was all."""
        if self._send_rounds() or not self._rounds_left:
            self._rounds_left = 0
            self._end_files()
        self._send()
        return not self._rounds_left and not self._waiting and self._reported == self._drops.told()

    def _send_rounds(self) -> bool:
        """Send up to LAST_ROUNDS rounds; return whether that was all."""
        while self._rounds_left and self._way.can_ship:
            self._rounds_left -= 1
            if not self._round() and not self._waiting:
                return True
        return False

    def _end_files(self) -> None:
        for file in self._files:
            if file.behind():
                file.skip(self._max_behind_bytes, self._drops)
            file.end(self._drops)
        self._files.clear()


def _random() -> float:
    """Return a random number from 0 to 1 without importing the random module."""
    return int.from_bytes(os.urandom(2), "big") / 65536
