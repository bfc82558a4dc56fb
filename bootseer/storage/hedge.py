"""How long a read may take, when it is overdue, and when a second one is sent to another replica. Pure.

All follow from how long reads of about the same length took lately. A second read costs the store twice, so it is
for the few stragglers that would hold up the rest: near the end, or when nothing else is on its way. Others wait
for their deadline and are tried again.
"""

from __future__ import annotations

from collections import deque

LEAST_DEADLINE_S = 5.0
FIRST_DEADLINE_S = 30.0  # until enough is known: a slow link is no dead one
DEADLINE_P95 = 8.0  # times
LEAST_OVERDUE_S = 0.5  # sooner than this a second read is not worth it
FIRST_OVERDUE_S = 3.0
OVERDUE_P95 = 3.0  # times
HEDGES = 0.05  # of the pieces, but one always
NEAR_END = 0.9  # of the pieces are done
FEW_IN_FLIGHT = 4

_SAMPLES = 256  # remembered for each class of lengths
_ENOUGH = 8  # samples from which p95 is taken seriously
_REFRESH = 8  # new samples after which p95 is worked out again
_LEAST_CLASS = 18  # lengths to 256 KiB take about the same time


class Patience:
    """How long reads take, by length: each power of two has its own record."""

    def __init__(self) -> None:
        self._classes: dict[int, _Durations] = {}

    def took(self, length_bytes: int, seconds: float) -> None:
        """A read brought its bytes in so long."""
        key = _class_of(length_bytes)
        if key not in self._classes:
            self._classes[key] = _Durations()
        self._classes[key].add(seconds)

    def p95_s(self, length_bytes: int) -> float | None:
        """None until enough is known."""
        durations = self._classes.get(_class_of(length_bytes))
        return None if durations is None else durations.p95_s

    def deadline_s(self, length_bytes: int, timeouts: int = 0) -> float:
        """How long a read may take at most, after so many that ended by it: doubled each time."""
        p95_s = self.p95_s(length_bytes)
        once_s = FIRST_DEADLINE_S if p95_s is None else max(LEAST_DEADLINE_S, DEADLINE_P95 * p95_s)
        return once_s * 2.0 ** min(timeouts, 10)

    def overdue_s(self, length_bytes: int) -> float:
        """The age from which a read is a straggler."""
        p95_s = self.p95_s(length_bytes)
        return FIRST_OVERDUE_S if p95_s is None else max(LEAST_OVERDUE_S, OVERDUE_P95 * p95_s)


def may_hedge(*, pieces: int, done: int, hedges: int, in_flight: int) -> bool:
    """Whether an overdue piece of a read of `pieces` gets a second read.

    `hedges`: sent for this read so far. `in_flight`: reads under way that are not overdue.
    """
    if hedges >= max(1, int(pieces * HEDGES)):
        return False
    return done > pieces * NEAR_END or in_flight < FEW_IN_FLIGHT


class _Durations:
    """The last durations of one class; p95 is worked out now and then."""

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
    return max(_LEAST_CLASS, max(0, length_bytes - 1).bit_length())
