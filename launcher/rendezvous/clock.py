"""PURE: the mapping of this node's monotonic clock to the coordinator's, with a bound on the error.

In: the four times of a Ping and its Pong, as in NTP. Out: coordinator's time of a local time. The true offset is
within half the round trip (less the time at the coordinator) of the estimate, however asymmetric the path is. Two
clocks drift apart, so an old sample is worth less than its own bound.
"""

from __future__ import annotations

from typing import NamedTuple

# Crystals are specified to 50-100 ppm each; NTP may slew CLOCK_MONOTONIC by up to 500 ppm, but seldom does.
DRIFT_PPM = 200
UNKNOWN_NS = 2**61  # bound of the error before the first sample: unknown


class _Sample(NamedTuple):
    local_ns: int
    offset_ns: int
    error_ns: int


class JobClock:
    """The clock mapping by the sample with the smallest bound, including its age."""

    __slots__ = ("_best",)

    def __init__(self) -> None:
        self._best: _Sample | None = None

    def add(self, sent_ns: int, received_ns: int, answered_ns: int, arrived_ns: int) -> None:
        """Add a sample: local time of the Ping, the coordinator's two times, local time of the Pong."""
        round_trip_ns = (arrived_ns - sent_ns) - (answered_ns - received_ns)
        if round_trip_ns < 0 or answered_ns < received_ns or arrived_ns < sent_ns:
            return  # impossible for a clock: not trusted
        middle_ns = (received_ns + answered_ns) // 2
        local_ns = (sent_ns + arrived_ns) // 2
        # The clocks also drift apart during the exchange; the last term covers the rounding of the divisions.
        error_ns = round_trip_ns // 2 + (arrived_ns - sent_ns) * DRIFT_PPM // 1_000_000 + 4
        sample = _Sample(local_ns, middle_ns - local_ns, error_ns)
        if self._best is None or sample.error_ns <= _error_at(self._best, arrived_ns):
            self._best = sample

    def map(self, local_ns: int) -> tuple[int, int]:
        """Return the coordinator's time of a local time, and the bound of its error."""
        if self._best is None:
            return local_ns, UNKNOWN_NS
        return local_ns + self._best.offset_ns, _error_at(self._best, local_ns)


def _error_at(sample: _Sample, local_ns: int) -> int:
    return sample.error_ns + abs(local_ns - sample.local_ns) * DRIFT_PPM // 1_000_000


def map_back(moment_ns: int, local_ns: int, job_ns: int, error_ns: int) -> tuple[int, int]:
    """Map a time near `local_ns`, whose mapping is known; an error of 0: there is only one clock."""
    if not error_ns:
        return moment_ns + job_ns - local_ns, 0
    # The age of the sample is known only to the node, so the bound is the sum of both.
    more_ns = abs(moment_ns - local_ns) * DRIFT_PPM // 1_000_000 + 1
    return moment_ns + job_ns - local_ns, error_ns + more_ns
