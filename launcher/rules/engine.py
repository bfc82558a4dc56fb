"""PURE: the rules of one node over one attempt: lines of ranks in, findings out.

A finding is reported once for a rank in an attempt (a late line: once until it is printed again), and for few
ranks. A rule that would harm the job is switched off, with a log line: a rule that takes too long, or an alarm
that matches all output of a rank. Rules about any rank have no clock here: their matches go to the coordinator.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from launcher.rules.clocks import ANY_RANK, LineDeadlines
from launcher.rules.rule import Rule

MAX_LINE_CHARACTERS = 2000  # of a line are searched
MAX_SHOWN_CHARACTERS = 200
MAX_RANKS_REPORTED = 4  # reported for one rule on a node; other ranks have the same finding
# An alarm that matches this share of a rank's output, of at least so many lines, is useless.
EVERYTHING_SHARE = 0.9
EVERYTHING_LINES = 20
JUMP_OF = 32  # the usual value is the median of so many
MIN_JUMP_VALUES = 8  # with fewer there is no usual value


class RuleFinding(NamedTuple):
    rule: Rule
    rank: int  # clocks.ANY_RANK: no rank in particular
    why: str  # for users, one line


class RuleMatch(NamedTuple):
    """A line of this node that matches a rule about any rank of the job."""

    rule: Rule
    what: str  # start | match | stop


class DisabledRule(NamedTuple):
    """A rule is switched off for this attempt."""

    rule: Rule
    why: str


class MetricValue(NamedTuple):
    """The newest value of a rule's metric."""

    rule: Rule
    rank: int
    value: float


Outcome = RuleFinding | RuleMatch | DisabledRule | MetricValue


class PatternMatch(NamedTuple):
    """A line that matches a pattern of a rule."""

    what: str  # start | match | stop
    line: str
    value: str = ""  # of the metric, as written


Limit = Callable[[Callable[[], list[PatternMatch]]], list[PatternMatch] | None]


def no_limit(work: Callable[[], list[PatternMatch]]) -> list[PatternMatch] | None:
    """Run the search without a time limit."""
    return work()


class RuleEngine:
    """The rules of one node over one attempt."""

    def __init__(self, rules: Sequence[Rule], ranks: Iterable[int], world_size: int, now_s: float) -> None:
        """Args: ranks: global ranks of this node, which run since `now_s`."""
        self._rules = list(rules)
        self._about = {rank: [rule for rule in rules if rule.is_about(rank, world_size)] for rank in ranks}
        self._clocks = LineDeadlines()
        self._is_on: dict[tuple[str, int], bool] = {}
        self._judges: dict[tuple[str, int], MetricCheck] = {}
        self._reported: dict[str, set[int]] = {}
        self._lines: dict[int, int] = {}  # read so far, by rank
        self._fits: dict[tuple[str, int], int] = {}  # matching ones, for alarms
        self._no_numbers: set[str] = set()
        for rank, about in self._about.items():
            for rule in about:
                if rule.ranks != "any":
                    self._clocks.begin(rule, rank, now_s)

    @property
    def wants_lines(self) -> bool:
        """Whether any rank of this node still has a rule."""
        return any(self._about.values())

    def read(
        self, rank: int, lines: Sequence[str], now_s: float, limit: Limit = no_limit, are_heartbeats: bool = False
    ) -> list[Outcome]:
        """Apply rules to output of a rank, in whole lines.

        Args: limit: runs a search, returns None if it takes too long; are_heartbeats: the lines are heartbeats.
        """
        outcomes: list[Outcome] = []
        lines = [line[:MAX_LINE_CHARACTERS] for line in lines]
        text = "\n".join(lines)
        self._lines[rank] = self._lines.get(rank, 0) + len(lines) * (not are_heartbeats)
        for rule in list(self._about.get(rank, ())):
            if rule.is_of_heartbeats != are_heartbeats or (
                rule.hints and not any(hint in text for hint in rule.hints)
            ):
                continue
            hits = limit(lambda rule=rule: list(_search(rule, lines)))  # type: ignore[misc]
            if hits is None:
                outcomes += self._switch_off(rule, f"it takes too long on the output of rank {rank}")
            elif hits:
                outcomes += self._apply_matches(rule, rank, hits, now_s)
        return outcomes

    def skipped(self, rank: int, now_s: float) -> list[Outcome]:
        """Handle output of a rank that was not read: it may have had an expected line."""
        self._clocks.renew(rank, now_s)
        return [
            RuleMatch(rule, "match")
            for rule in self._about.get(rank, ())
            if rule.ranks == "any" and rule.has_clock
        ]

    def ended(self, rank: int) -> None:
        """Stop the clocks of a rank that has ended, or whose output cannot be read."""
        self._clocks.ended(rank)

    def tick(self, now_s: float) -> list[Outcome]:
        """Return findings for lines that are late now."""
        late = self._clocks.take_late(now_s)
        return [outcome for each in late for outcome in self._tell(each.rule, each.rank, each.why, again=True)]

    def _apply_matches(self, rule: Rule, rank: int, hits: list[PatternMatch], now_s: float) -> list[Outcome]:
        if rule.is_alarm and not rule.is_of_heartbeats and (why := self._fits_everything(rule, rank, hits)):
            return self._switch_off(rule, why)
        outcomes: list[Outcome] = []
        seen: dict[str, None] = {}  # in order of the last line of each kind
        value: float | None = None
        place = rule.name, ANY_RANK if rule.ranks == "any" else rank
        for hit in hits:
            is_on = self._is_on.get(place, not rule.start)
            if hit.what != "match":
                if is_on == (hit.what == "start"):
                    continue  # no change
                self._is_on[place] = hit.what == "start"
                if hit.what == "start":
                    self._clocks.started(rule, rank, now_s)
                else:
                    self._clocks.stopped(rule, rank)
            elif not is_on:
                continue
            elif rule.metric and (number := parse_number(hit.value)) is None:
                outcomes += self._report_no_number(rule, hit)
                continue
            elif rule.metric and number is not None:
                value = number
                why = self._judges.setdefault((rule.name, rank), MetricCheck(rule)).look(number)
                outcomes += self._tell(rule, rank, f"{why}: {_quote(hit.line)}") if why else ()
            elif rule.is_alarm:
                outcomes += self._tell(rule, rank, _quote(hit.line))
            if hit.what == "match":
                self._clocks.matched(rule, rank, now_s)
            seen.pop(hit.what, None)
            seen[hit.what] = None
        if value is not None:
            outcomes.append(MetricValue(rule, rank, value))
        if rule.ranks == "any" and rule.has_clock:
            outcomes += [RuleMatch(rule, what) for what in seen]
        return outcomes

    def _fits_everything(self, rule: Rule, rank: int, hits: list[PatternMatch]) -> str:
        lines = self._lines[rank]
        fits = self._fits.get((rule.name, rank), 0) + sum(hit.what == "match" for hit in hits)
        self._fits[rule.name, rank] = fits
        if lines < EVERYTHING_LINES or fits < EVERYTHING_SHARE * lines:
            return ""
        return f"it matches {fits} of the {lines} lines of rank {rank} so far, as {_quote(hits[0].line)}"

    def _tell(self, rule: Rule, rank: int, why: str, *, again: bool = False) -> list[Outcome]:
        told = self._reported.setdefault(rule.name, set())
        if (rank in told and not again) or (rank not in told and len(told) >= MAX_RANKS_REPORTED):
            return []
        told.add(rank)
        return [RuleFinding(rule, rank, why)]

    def _report_no_number(self, rule: Rule, hit: PatternMatch) -> list[Outcome]:
        if rule.name in self._no_numbers:
            return []
        self._no_numbers.add(rule.name)
        return [
            RuleFinding(
                rule._replace(action="report"), ANY_RANK, f"{_quote(hit.value)} is no number: {_quote(hit.line)}"
            )
        ]

    def _switch_off(self, rule: Rule, why: str) -> list[Outcome]:
        for about in self._about.values():
            if rule in about:
                about.remove(rule)
        self._clocks.drop(rule)
        return [DisabledRule(rule, why)]


def _search(rule: Rule, lines: Sequence[str]) -> Iterator[PatternMatch]:
    """Yield matches. One line may match several patterns: stop, start and the rule's own, in this order."""
    pattern = re.compile(rule.pattern).search
    start = re.compile(rule.start).search if rule.start else None
    stop = re.compile(rule.stop).search if rule.stop else None
    for line in lines:
        if stop is not None and stop(line):
            yield PatternMatch("stop", line)
        if start is not None and start(line):
            yield PatternMatch("start", line)
        if found := pattern(line):
            yield PatternMatch("match", line, found[rule.metric] or "" if rule.metric else "")


def _quote(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= MAX_SHOWN_CHARACTERS else text[: MAX_SHOWN_CHARACTERS - 3] + "...")


def parse_number(text: str) -> float | None:
    """Parse 1.5, 1e-3, 1,024.5, nan, -inf or 85%; return None for text that is not a number."""
    try:
        return float(text.strip("[](){};,%'\" ").rstrip(".").replace(",", ""))
    except ValueError:
        return None


class MetricCheck:
    """Checks the values of one rule and one rank."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._usual: deque[float] = deque(maxlen=JUMP_OF)
        self._wrong = 0  # in a row

    def look(self, value: float) -> str:
        """Check a value. Returns: what is wrong with it, for users; "" if nothing, or not often enough yet."""
        why = self._find_wrong(value)
        # A value that is reported as a jump joins the usual values only after it has persisted.
        if math.isfinite(value) and (not why or self._wrong >= max(self._rule.times, MIN_JUMP_VALUES)):
            self._usual.append(abs(value))
        self._wrong = self._wrong + 1 if why else 0
        if self._wrong < self._rule.times:
            return ""
        return f"{why}, {self._wrong} times in a row" if self._wrong > 1 else why

    def _find_wrong(self, value: float) -> str:
        rule = self._rule
        shown = f"{rule.metric} is {value:g}"
        if rule.must_be_finite and not math.isfinite(value):
            return shown
        # nan is neither below nor above a bound.
        if rule.must_be_below is not None and not value < rule.must_be_below:
            return f"{shown}, and must be below {rule.must_be_below:g}"
        if rule.must_be_above is not None and not value > rule.must_be_above:
            return f"{shown}, and must be above {rule.must_be_above:g}"
        if rule.must_not_jump is not None and len(self._usual) >= MIN_JUMP_VALUES:
            usual = sorted(self._usual)[len(self._usual) // 2]
            if usual > 0 and abs(value) > rule.must_not_jump * usual:
                return f"{shown}: more than {rule.must_not_jump:g} times its usual {usual:g}"
        return ""
