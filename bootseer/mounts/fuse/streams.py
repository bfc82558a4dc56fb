"""Which reads of an open file are sequential, and how far ahead of them to read. Pure.

In: ranges as the kernel requests them, which may be slightly out of order and of several readers at once. Out: a
window in bytes: 0 for random reads, more the longer a run is.
"""

from __future__ import annotations

from typing import NamedTuple

START_BYTES = 4 << 20  # a run of so much is a sequential reader; programs that jump read less in one place
GROWTH = 8  # read-ahead, in lengths of the run
RUNS = 16  # of one open file that are remembered
DISORDER_BYTES = 8 << 20  # reads of one run may overtake each other by so much


class ReadAheadWindow(NamedTuple):
    """What to read ahead of a run: `window_bytes` from `position` on; 0 for none."""

    run: int  # number of the run in an open file
    position: int
    window_bytes: int


class _Run:
    __slots__ = ("begin", "end", "number")

    def __init__(self, number: int, begin: int, end: int) -> None:
        self.number, self.begin, self.end = number, begin, end


class SequentialRuns:
    """The runs of one open file."""

    def __init__(self) -> None:
        self._runs: list[_Run] = []  # the one used last at the end
        self._made = 0

    def note(self, offset: int, length: int) -> ReadAheadWindow:
        end = offset + length
        run = self._extend(offset, end)
        if run is None:
            self._made += 1
            run = _Run(self._made, offset, end)
            self._runs.append(run)
            del self._runs[:-RUNS]
        size = run.end - run.begin
        is_reader = size >= START_BYTES and run.end - end <= DISORDER_BYTES
        return ReadAheadWindow(run.number, run.end, size * GROWTH if is_reader else 0)

    def _extend(self, offset: int, end: int) -> _Run | None:
        """Return the run that a read extends, joined with the one that it reaches."""
        found = None
        for run in reversed(self._runs):
            if run.begin <= offset <= run.end < end:
                found = run
                found.end = end
                break
        for run in reversed(self._runs):
            if run is not found and run.begin == end:
                if found is None:
                    run.begin = offset  # it was out of order
                    found = run
                else:
                    found.end = run.end
                    self._runs.remove(run)
                break
        if found is not None:
            self._runs.remove(found)
            self._runs.append(found)
        return found
