"""Deadlines of reads, and when to send a second (hedged) read to another replica. Pure.

All limits follow from the recent durations of reads of similar length. A hedged read doubles the store's cost. So
it is only for a few stragglers that would delay the rest: near the end, or without other in-flight reads. Other
reads wait for their deadline and are retried.
"""

from __future__ import annotations

from collections import deque

MIN_DEADLINE_S = 5.0
FIRST_DEADLINE_S = 30.0  # until enough is known: a slow link is not a dead one
DEADLINE_P95 = 8.0  # times
MIN_OVERDUE_S = 0.5  # earlier, a second read is not worth it
FIRST_OVERDUE_S = 3.0
OVERDUE_P95 = 3.0  # times
HEDGES = 0.05  # share of the pieces, but at least one
NEAR_END = 0.9  # of the pieces are done
FEW_IN_FLIGHT = 4

_SAMPLES = 256  # kept for each class of lengths
_ENOUGH = 8  # samples before p95 is used
_REFRESH = 8  # new samples before p95 is computed again
_MIN_CLASS = 18  # lengths up to 256 KiB take about the same time


class ReadDurations:
    """Durations of reads by length; each power of two has its own record."""

    def __init__(self) -> None:
        self._classes: dict[int, _Durations] = {}

    def took(self, length_bytes: int, seconds: float) -> None:
        """Record the duration of a successful read."""
        key = _class_of(length_bytes)
        if key not in self._classes:
            self._classes[key] = _Durations()
        self._classes[key].add(seconds)

    def p95_s(self, length_bytes: int) -> float | None:
        """Return the 95th percentile, or None until enough is known."""
        durations = self._classes.get(_class_of(length_bytes))
        return None if durations is None else durations.p95_s

    def deadline_s(self, length_bytes: int, timeouts: int = 0) -> float:
        """Return the longest time for a read, doubled for each earlier timeout."""
        p95_s = self.p95_s(length_bytes)
        once_s = FIRST_DEADLINE_S if p95_s is None else max(MIN_DEADLINE_S, DEADLINE_P95 * p95_s)
        return once_s * 2.0 ** min(timeouts, 10)

    def overdue_s(self, length_bytes: int) -> float:
        """Return the age from which a read is a straggler."""
        p95_s = self.p95_s(length_bytes)
        return FIRST_OVERDUE_S if p95_s is None else max(MIN_OVERDUE_S, OVERDUE_P95 * p95_s)


def may_hedge(*, pieces: int, done: int, hedges: int, in_flight: int) -> bool:
    """Return whether an overdue piece of a read of `pieces` gets a second read.

    `hedges`: sent for this read so far. `in_flight`: in-flight reads that are not overdue.
    """
    if hedges >= max(1, int(pieces * HEDGES)):
        return False
    return done > pieces * NEAR_END or in_flight < FEW_IN_FLIGHT


class _Durations:
    """The last durations of one class; p95 is computed at intervals."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_SAMPLES)
        self._new = 0
        self.p95_s: float | None = None

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)
        self._new += 1
        if self._new >= _REFRESH or (self.p95_s is None and len(self._seconds) >= _ENOUGH):
            self._new = 0
            ordered = sorted(self._seconds)
            self.p95_s = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]


def _class_of(length_bytes: int) -> int:
    return max(_MIN_CLASS, max(0, length_bytes - 1).bit_length())
