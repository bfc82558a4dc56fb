"""The cadence of a job: how often progress happens, and the longest healthy gap between two events. Pure.

Gaps of training have several modes (steps of 0.05 s, an evaluation of 60 s, a checkpoint of 20 s). So only the
longest gap so far is kept, no mean and no variance.
"""

from __future__ import annotations


class Cadence:
    """The learned gaps of one sort of progress, over all attempts."""

    __slots__ = ("attempt_gaps", "gaps", "last_s", "longest_s", "max_s", "typical_s")

    def __init__(self, max_s: float) -> None:
        self.max_s = max_s  # longer gaps are not learned: one odd gap must not hide hangs for days
        self.gaps = self.attempt_gaps = 0
        self.longest_s = 0.0
        self.typical_s = 0.0  # time of a single event
        self.last_s: float | None = None  # in this attempt; None: none yet

    def note(self, first_s: float, last_s: float, count: int = 1, excused: bool = False) -> bool:
        """Record `count` events, the first at `first_s`, the last at `last_s`; return whether they are new.

        An excused gap was allowed or had its own cause, so it is not learned.
        """
        before_s = self.last_s
        if before_s is not None and last_s <= before_s:
            return False
        self.last_s = last_s
        gaps = count - (before_s is None)
        self.gaps += gaps
        self.attempt_gaps += gaps
        if before_s is not None:
            gap_s = min(first_s - before_s, self.max_s)
            if gap_s > self.longest_s and not excused:
                self.longest_s = gap_s
        return True

    def note_typical(self, each_s: float) -> None:
        """Track the median time of single events: an evaluation among them moves it little."""
        if self.typical_s <= 0.0:
            self.typical_s = each_s
        else:
            self.typical_s += 0.05 * (min(each_s, 3 * self.typical_s) - self.typical_s)

    def begin_attempt(self) -> None:
        """Restart counting; keep the learned gaps."""
        self.attempt_gaps = 0
        self.last_s = None

    def forget_last(self) -> None:
        """Forget the last event: the clock has changed, so the length of the current gap is unknown."""
        self.last_s = None
