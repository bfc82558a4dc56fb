"""Sends what the event files of this node say to the coordinator, as it comes and within bounds.

In: the paths of event files, and from the coordinator the wish to have them. Out: batches of lines over the
connection to it. The files are the backlog: they are read only when what was read before is gone, so memory stays
bounded, ranks wait for nothing, and a rank that died has its events sent as any other. event_batch.py decides
which lines go.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from enum import Enum
from typing import Protocol

from launcher.event_files import EventFile
from launcher.loop import Alarm, EventLoop
from launcher.rendezvous.clock import UNKNOWN_NS
from launcher.rendezvous.event_batch import Drops, Sieve, pack
from launcher.rendezvous.messages import EventBatch, EventsDropped

PERIOD_S = 1.0  # between two looks at the files
PERIOD_NODES = 500  # with more nodes the coordinator is to hear no more of them at once
AGAIN_S = 0.05  # while there is more
LAST_S = 1.0  # for what is left at the end of the job
_LAST_AGAIN_S = 0.01
ROUND_BYTES = 1024 * 1024  # read before other callbacks get a turn
LAST_ROUNDS = 8
MOST_BEHIND_BYTES = 64 * 1024 * 1024  # of one file; what is older is counted and not read
_KEPT_BEHIND_BYTES = 1024 * 1024
_SKIP_BYTES = 16 * 1024 * 1024  # in one round
TELL_DROPS_S = 10.0  # where there is no line to be sent with


class Way(Protocol):
    """The connection to the coordinator, as far as events go."""

    @property
    def can_ship(self) -> bool:
        """Whether what was sent before has arrived, so that nothing urgent would wait for a batch."""

    def ship(self, batch: EventBatch) -> None:
        """Sends it."""

    def end_shipping(self) -> None:
        """There is nothing more to be sent."""

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        """See Link."""


class State(Enum):
    AT_WORK = "at work"
    LAST = "last"  # the job is over, or this node leaves: what is left goes out
    OVER = "over"


class Shipper:
    """See the module's docstring; made when the coordinator wants events."""

    def __init__(self, loop: EventLoop, way: Way, own: EventFile, nodes: int) -> None:
        """Args: own: the file of this node's bootrun; nodes: how many there may be."""
        self._loop = loop
        self._way = way
        self._files = [own]
        self._drops = Drops()
        self._told = EventsDropped(0, 0, 0, 0)
        self._told_s = loop.time()
        self._sieve = Sieve(nodes, self._drops, loop.time())
        self._waiting: list[bytes] = []
        self._alarm = Alarm(loop)
        self._due_s = 0.0
        self._rounds_left = LAST_ROUNDS
        self._until_s = 0.0  # of the last events
        self._state = State.AT_WORK
        self._batches = self._lines = self._bytes = 0
        self._set_nodes(nodes)
        self._plan(self._period_s * _random())

    def _set_nodes(self, nodes: int) -> None:
        self._period_s = PERIOD_S * max(1.0, nodes / PERIOD_NODES)
        self._sieve.set_nodes(nodes)

    def follow(self, paths: Iterable[str], nodes: int) -> None:
        """An attempt of so many nodes begins, with these files of its ranks; those of the last one are done."""
        if self._state is not State.AT_WORK:
            return
        for file in self._files[1:]:
            file.is_ended = True
        self._files += [EventFile(path) for path in paths]
        self._set_nodes(nodes)

    def hurry(self) -> None:
        """Something has ended: the next look comes a little sooner."""
        soon_s = self._period_s * (0.05 + 0.1 * _random())
        if self._state is State.AT_WORK and self._loop.time() + soon_s < self._due_s:
            self._plan(soon_s)

    def flush(self) -> None:
        """Sends what can be sent at once; for a node that leaves."""
        if self._state is State.AT_WORK:
            self._state = State.LAST
            self._send_last()
            self._waiting.clear()
            self.close()

    def finish(self) -> None:
        """The job is over: what there is goes at once; what this node still writes goes at `end`."""
        if self._state is State.AT_WORK:
            self._state = State.LAST
            self._until_s = self._loop.time() + LAST_S
            self._send_rounds()
            self._alarm.set(LAST_S, self.end)

    def end(self) -> None:
        """This node writes no more."""
        if self._state is State.LAST:
            self._finish_some()
        else:
            self.flush()

    def close(self) -> None:
        """Looks no more."""
        self._state = State.OVER
        self._alarm.cancel()

    def statistics(self) -> dict[str, int]:
        """Counters for the tests."""
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
        """Sends what waits, then reads and sends the next lines; whether there is more to do at once."""
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
        """The next lines of all files in turn; whether some were left for the next round."""
        has_skipped = self._skip_oldest()
        left_bytes = ROUND_BYTES
        progress = True
        while progress and left_bytes > 0:
            progress = False
            for file in list(self._files):
                lines, taken = file.take(self._drops) if file.behind() else ([], 0)
                self._waiting += self._sieve.sift(lines, now_s)
                left_bytes -= taken
                progress = progress or taken > 0
                if file.is_ended and not taken:
                    file.end(self._drops)
                    self._files.remove(file)
                if left_bytes <= 0:
                    break
        is_full = left_bytes <= 0
        if is_full:
            self._files[1:] = [*self._files[2:], *self._files[1:2]]  # another one begins the next time
        return is_full or has_skipped

    def _skip_oldest(self) -> bool:
        """Of one file that has grown too fast, the oldest part is only counted."""
        for file in self._files:
            behind = file.behind()
            if behind > MOST_BEHIND_BYTES:
                file.skip(min(behind - _KEPT_BEHIND_BYTES, _SKIP_BYTES), self._drops)
                return True
        return False

    def _send(self) -> None:
        now_ns = time.monotonic_ns()
        job_ns, error_ns = self._way.to_job_clock(now_ns)
        is_last = self._state is State.LAST
        if error_ns >= UNKNOWN_NS and not is_last:
            return  # the first answer to a heartbeat is soon there
        while self._waiting and self._way.can_ship:
            packed = pack(self._waiting)
            del self._waiting[: packed.lines]
            self._ship(EventBatch(*packed, now_ns, job_ns, error_ns, self._drops.told()))
        is_due = is_last or self._loop.time() - self._told_s >= TELL_DROPS_S
        if is_due and self._drops.told() != self._told and self._way.can_ship:
            self._ship(EventBatch(b"", 0, 0, now_ns, job_ns, error_ns, self._drops.told()))

    def _ship(self, batch: EventBatch) -> None:
        self._told, self._told_s = batch.dropped, self._loop.time()
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
        """What can be sent now, all that the files hold or the last part of it; whether that was all."""
        if self._send_rounds() or not self._rounds_left:
            self._rounds_left = 0
            self._end_files()
        self._send()
        return not self._rounds_left and not self._waiting and self._told == self._drops.told()

    def _send_rounds(self) -> bool:
        """Sends as much as may be at the end; whether that was all there is."""
        while self._rounds_left and self._way.can_ship:
            self._rounds_left -= 1
            if not self._round() and not self._waiting:
                return True
        return False

    def _end_files(self) -> None:
        for file in self._files:
            if file.behind():
                file.skip(MOST_BEHIND_BYTES, self._drops)
            file.end(self._drops)
        self._files.clear()


def _random() -> float:
    """Between 0 and 1; the random module is not worth its import."""
    return int.from_bytes(os.urandom(2), "big") / 65536
