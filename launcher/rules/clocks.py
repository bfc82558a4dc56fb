"""PURE: lines that ranks must print within a time, and again: finds late ones, by rule and rank.

Times are seconds of one monotonic clock. A rank whose output was not read completely gets the benefit of
the doubt.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.rules.rule import Rule

ANY_RANK = -1  # for rules about any rank: one clock for all


class LateLine(NamedTuple):
    """A line that a rank has not printed in time."""

    rule: Rule
    rank: int  # ANY_RANK: no rank has printed it
    why: str  # for users


class _Clock:
    __slots__ = ("has_come", "is_told", "rule", "since_s")

    def __init__(self, rule: Rule, now_s: float) -> None:
        self.rule = rule
        self.since_s: float | None = None if rule.start else now_s  # None: does not run
        self.has_come = False  # a matching line
        self.is_told = False  # the late line was reported

    def limit_s(self) -> float | None:
        return self.rule.must_recur_within_s if self.has_come else self.rule.must_start_within_s

    def due_s(self, slack_s: float, slack_share: float) -> float | None:
        limit_s = self.limit_s()
        if limit_s is None or self.since_s is None or self.is_told:
            return None
        return self.since_s + limit_s + slack_s + slack_share * limit_s


class LineDeadlines:
    """The clocks of one attempt. Methods ignore rules without a clock."""

    def __init__(self, slack_s: float = 0.0, slack_share: float = 0.0) -> None:
        """Args: slack_s, slack_share (of a limit): how much later the report of a line may arrive."""
        self._slack = slack_s, slack_share
        self._clocks: dict[tuple[str, int], _Clock] = {}

    def begin(self, rule: Rule, rank: int, now_s: float) -> None:
        """Start a rank's clock; the rank runs now."""
        if rule.has_clock:
            self._clocks[rule.name, rank] = _Clock(rule, now_s)

    def started(self, rule: Rule, rank: int, now_s: float) -> None:
        """Handle a line that matches the rule's `start`."""
        clock = self._clocks.get((rule.name, rank))
        if clock is not None and clock.since_s is None:
            clock.since_s, clock.has_come, clock.is_told = now_s, False, False

    def matched(self, rule: Rule, rank: int, now_s: float) -> None:
        """Handle a line that matches the rule's pattern."""
        clock = self._clocks.get((rule.name, rank))
        if clock is not None and clock.since_s is not None:
            clock.since_s, clock.has_come, clock.is_told = now_s, True, False

    def stopped(self, rule: Rule, rank: int) -> None:
        """Handle a line that matches the rule's `stop`."""
        clock = self._clocks.get((rule.name, rank))
        if clock is not None:
            clock.since_s = None

    def renew(self, rank: int, now_s: float) -> None:
        """Restart a rank's clocks: some of its output was not read, which may have had the line."""
        for (_, of), clock in self._clocks.items():
            if of == rank and clock.since_s is not None:
                clock.since_s = now_s

    def ended(self, rank: int) -> None:
        """Remove the clocks of a rank that writes no more."""
        for key in [key for key in self._clocks if key[1] == rank]:
            del self._clocks[key]

    def drop(self, rule: Rule) -> None:
        """Remove the clocks of a rule that is switched off."""
        for key in [key for key in self._clocks if key[0] == rule.name]:
            del self._clocks[key]

    def deadline_s(self) -> float | None:
        """Return when the next line will be late."""
        dues_s = (clock.due_s(*self._slack) for clock in self._clocks.values())
        return min((due_s for due_s in dues_s if due_s is not None), default=None)

    def take_late(self, now_s: float) -> list[LateLine]:
        """Return late lines; each once, until a line matches."""
        late: list[LateLine] = []
        for (_, rank), clock in self._clocks.items():
            due_s, limit_s = clock.due_s(*self._slack), clock.limit_s()
            if due_s is None or limit_s is None or now_s < due_s:
                continue
            clock.is_told = True
            what = "no further matching line" if clock.has_come else "no matching line"
            since = (
                "the last" if clock.has_come else "the rule's start" if clock.rule.start else "the ranks' start"
            )
            late.append(LateLine(clock.rule, rank, f"{what} within {limit_s:g} s of {since}"))
        return late
