"""PURE: this node's monotonic clock as the coordinator's, with a bound of the error.

In: the four times of a Ping and its Pong, as in NTP. Out: coordinator's time of a local moment. The true offset
lies within half the round trip (less the time at the coordinator) of the estimate, however unequal the ways are.
Two clocks drift apart, so an old sample is worth less than its own bound says.
"""

from __future__ import annotations

from typing import NamedTuple

# Crystals are specified to 50-100 ppm each; NTP may slew CLOCK_MONOTONIC by up to 500 ppm, but seldom does.
DRIFT_PPM = 200
UNKNOWN_NS = 2**61  # bound of the error before the first sample: nothing can be said


class _Sample(NamedTuple):
    local_ns: int
    offset_ns: int
    error_ns: int


class JobClock:
    """Keeps the sample with the smallest bound, its age counted."""

    __slots__ = ("_best",)

    def __init__(self) -> None:
        self._best: _Sample | None = None

    def add(self, sent_ns: int, received_ns: int, answered_ns: int, arrived_ns: int) -> None:
        """Local time of the Ping, the coordinator's two times, local time of the Pong."""
        round_trip_ns = (arrived_ns - sent_ns) - (answered_ns - received_ns)
        if round_trip_ns < 0 or answered_ns < received_ns or arrived_ns < sent_ns:
            return  # no clock runs like that: not to be believed
        middle_ns = (received_ns + answered_ns) // 2
        local_ns = (sent_ns + arrived_ns) // 2
        # The clocks also drift apart during the exchange; the last term is for what the divisions cut off.
        error_ns = round_trip_ns // 2 + (arrived_ns - sent_ns) * DRIFT_PPM // 1_000_000 + 4
        sample = _Sample(local_ns, middle_ns - local_ns, error_ns)
        if self._best is None or sample.error_ns <= _error_at(self._best, arrived_ns):
            self._best = sample

    def map(self, local_ns: int) -> tuple[int, int]:
        """The coordinator's time of a local moment, and the bound of its error."""
        if self._best is None:
            return local_ns, UNKNOWN_NS
        return local_ns + self._best.offset_ns, _error_at(self._best, local_ns)


def _error_at(sample: _Sample, local_ns: int) -> int:
    return sample.error_ns + abs(local_ns - sample.local_ns) * DRIFT_PPM // 1_000_000


def map_back(moment_ns: int, local_ns: int, job_ns: int, error_ns: int) -> tuple[int, int]:
    """The same for a moment near `local_ns`, whose mapping is known; an error of 0: there is but one clock."""
    if not error_ns:
        return moment_ns + job_ns - local_ns, 0
    # Not by how much the sample is older, which only the node knows: the bound is that of both ways added.
    more_ns = abs(moment_ns - local_ns) * DRIFT_PPM // 1_000_000 + 1
    return moment_ns + job_ns - local_ns, error_ns + more_ns
