"""PURE: which bytes of something are there: ranges, sorted, none touching another."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Extents:
    """Ranges from a start to before an end, in bytes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        return len(self._starts)

    @property
    def total_bytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, start: int, end: int) -> None:
        """These are there; some may have been before."""
        if start >= end:
            return
        first = bisect_left(self._ends, start)  # those that touch it as well
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        """These are there no more."""
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        if first >= last:
            return
        left = [(self._starts[first], start), (end, self._ends[last - 1])]
        kept = [(a, b) for a, b in left if a < b]
        self._starts[first:last] = [a for a, _ in kept]
        self._ends[first:last] = [b for _, b in kept]

    def missing(self, start: int, end: int) -> list[tuple[int, int]]:
        """What of a range is not there, in order."""
        found = []
        place = bisect_right(self._ends, start)
        while start < end:
            if place == len(self._starts) or self._starts[place] >= end:
                found.append((start, end))
                break
            if self._starts[place] > start:
                found.append((start, self._starts[place]))
            start = self._ends[place]
            place += 1
        return found

    def reach(self, start: int) -> int:
        """The end of what is there without a gap from `start` on; `start` itself if that is not there."""
        place = bisect_right(self._ends, start)
        if place < len(self._starts) and self._starts[place] <= start:
            return self._ends[place]
        return start
