"""How often something comes, and the longest healthy gap between two of it: the cadence of a job. Pure.

Gaps of training have several modes (steps of 0.05 s, an evaluation of 60 s, a checkpoint of 20 s), so no mean and
no variance is kept: only the longest gap so far.
"""

from __future__ import annotations


class Cadence:
    """What was learned of the gaps of one sort of progress, in all attempts."""

    __slots__ = ("attempt_gaps", "gaps", "last_s", "longest_s", "most_s", "typical_s")

    def __init__(self, most_s: float) -> None:
        self.most_s = most_s  # nothing longer is learned: one odd gap must not blind for days
        self.gaps = self.attempt_gaps = 0
        self.longest_s = 0.0
        self.typical_s = 0.0  # of a single one
        self.last_s: float | None = None  # in this attempt; None: none yet

    def note(self, first_s: float, last_s: float, count: int = 1, excused: bool = False) -> bool:
        """So many came, the first of them at `first_s`, the last at `last_s`; whether that is news.

        An excused gap was allowed or had a cause of its own: it teaches nothing of what is usual.
        """
        before_s = self.last_s
        if before_s is not None and last_s <= before_s:
            return False
        self.last_s = last_s
        gaps = count - (before_s is None)
        self.gaps += gaps
        self.attempt_gaps += gaps
        if before_s is not None:
            gap_s = min(first_s - before_s, self.most_s)
            if gap_s > self.longest_s and not excused:
                self.longest_s = gap_s
        return True

    def note_typical(self, each_s: float) -> None:
        """Follows the middle of what single ones take: an evaluation among them moves it little."""
        if self.typical_s <= 0.0:
            self.typical_s = each_s
        else:
            self.typical_s += 0.05 * (min(each_s, 3 * self.typical_s) - self.typical_s)

    def begin_attempt(self) -> None:
        """Counting begins anew; what is usual stays known."""
        self.attempt_gaps = 0
        self.last_s = None

    def forget_last(self) -> None:
        """The clock is another one now: how long the gap in progress is cannot be known."""
        self.last_s = None
