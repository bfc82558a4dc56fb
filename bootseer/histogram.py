"""PURE: how often something took how long, in a few numbers, as Prometheus counts histograms."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

# From a read of a local disk to the longest wait for a store; each three times the one before.
BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class TimeHistogram:
    """Counts of durations. `counts` has one number a bound, of durations up to it and above the one before."""

    def __init__(self, bounds_s: Sequence[float] = BOUNDS_S) -> None:
        """Args: bounds_s: upper bounds, ascending; the last of `counts` is of all above."""
        self.bounds_s = tuple(bounds_s)
        self.counts = [0.0] * (len(self.bounds_s) + 1)
        self.sum_s = 0.0

    def add(self, took_s: float, count: float = 1) -> None:
        """Count this duration, `count` times."""
        self.counts[bisect_left(self.bounds_s, took_s)] += count
        self.sum_s += took_s * count

    def record(self) -> dict[str, Any]:
        """Return the counts so far, for an answer in JSON."""
        return {"bounds_s": self.bounds_s, "counts": self.counts, "sum_s": self.sum_s}
