"""PURE: intervals of time in nanoseconds: their union, and the lower median."""

from __future__ import annotations

from bootseer.light_typing import Iterable

Interval = tuple[int, int]


def union_ns(spans: Iterable[Interval], low_ns: int | None = None, high_ns: int | None = None) -> int:
    """Return the time inside at least one of `spans`, between the limits."""
    total = 0
    reached = low_ns
    for begin, end in sorted(spans):
        low = begin if reached is None else max(begin, reached)
        high = end if high_ns is None else min(end, high_ns)
        if high > low:
            total += high - low
            reached = high
    return total


def median_low(values: Iterable[float]) -> float:
    """Return the median; of two middle values the lower one, so that it is always an observed value."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]
