"""A sorted set of byte ranges of one file; adjacent ranges are merged. Pure.

Ranges are half open: (start, end). An arena records the requested ranges, a peer its present and in-flight ones.
The difference of two sets is the remaining work, or the data that was fetched in vain.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

Span = tuple[int, int]  # start, end in bytes


class Extents:
    """A mutable set of ranges. Each operation takes O(log n), plus the ranges that it touches."""

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in spans:
            self.add(start, end)

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        first = bisect_left(self._ends, start)  # the first range that touches or follows
        last = bisect_right(self._starts, end)  # one past the last range that touches
        if first < last:
            start = min(start, self._starts[first])
            end = max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]

    def remove(self, start: int, end: int) -> None:
        if start >= end:
            return
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        if first >= last:
            return
        left = (self._starts[first], start)
        right = (end, self._ends[last - 1])
        rest = [span for span in (left, right) if span[0] < span[1]]
        self._starts[first:last] = [span[0] for span in rest]
        self._ends[first:last] = [span[1] for span in rest]

    def within(self, start: int, end: int) -> list[Span]:
        """Return the parts of the range that are in the set."""
        first = bisect_right(self._ends, start)
        last = bisect_left(self._starts, end)
        return [(max(self._starts[at], start), min(self._ends[at], end)) for at in range(first, last)]

    def missing(self, start: int, end: int) -> list[Span]:
        """Return the parts of the range that are not in the set."""
        found = []
        for have_start, have_end in self.within(start, end):
            if start < have_start:
                found.append((start, have_start))
            start = have_end
        if start < end:
            found.append((start, end))
        return found

    def reach(self, start: int) -> int:
        """Return the end of the gapless run from `start` on, or `start` if it is not in the set."""
        place = bisect_right(self._ends, start)
        if place < len(self._starts) and self._starts[place] <= start:
            return self._ends[place]
        return start

    def minus(self, other: Extents) -> Extents:
        """Return the ranges of this set that are not in `other`."""
        return Extents(gap for start, end in self for gap in other.missing(start, end))

    @property
    def total_bytes(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def __iter__(self) -> Iterator[Span]:
        return iter(list(zip(self._starts, self._ends, strict=True)))

    def __len__(self) -> int:
        return len(self._starts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extents) and self._starts == other._starts and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"Extents({list(self)})"


def cut(start: int, end: int, every_bytes: int) -> Iterator[Span]:
    """Cut a range at multiples of `every_bytes`."""
    while start < end:
        stop = min(end, (start // every_bytes + 1) * every_bytes)
        yield start, stop
        start = stop
