"""PURE: the rules of one node over one attempt: lines of ranks in, findings out.

A rule is told of a rank once in an attempt (of a line that is late: once until it comes again), and of few ranks.
What would harm the job is switched off, with a word: a rule that takes too long, and an alarm that fits all that a
rank prints. Rules about any rank of the job have no clock here: what is seen for them goes to the coordinator.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from launcher.rules.clocks import ANY_RANK, Clocks
from launcher.rules.metric import Judge, parse_number
from launcher.rules.rule import Rule

MOST_LINE_CHARACTERS = 2000  # of a line are looked at
MOST_SHOWN_CHARACTERS = 200
MOST_RANKS_TOLD = 4  # of one rule on a node; the others have the same
# An alarm that fits so much of what a rank has printed, of so many lines at least, tells nothing.
EVERYTHING_SHARE = 0.9
EVERYTHING_LINES = 20


class Found(NamedTuple):
    """A rule was broken."""

    rule: Rule
    rank: int  # clocks.ANY_RANK: no rank in particular
    why: str  # for people, one line


class Seen(NamedTuple):
    """For a rule about any rank of the job: a line of this node."""

    rule: Rule
    what: str  # start | match | stop


class Off(NamedTuple):
    """A rule is switched off for this attempt."""

    rule: Rule
    why: str


class Measured(NamedTuple):
    """The newest value of a rule's metric."""

    rule: Rule
    rank: int
    value: float


Outcome = Found | Seen | Off | Measured


class Hit(NamedTuple):
    """A line that means something to a rule."""

    what: str  # start | match | stop
    line: str
    value: str = ""  # of the metric, as written


Limit = Callable[[Callable[[], list[Hit]]], list[Hit] | None]


def no_limit(work: Callable[[], list[Hit]]) -> list[Hit] | None:
    """Lets it take what it takes."""
    return work()


class RuleEngine:
    """See the module's docstring."""

    def __init__(self, rules: Sequence[Rule], ranks: Iterable[int], world_size: int, now_s: float) -> None:
        """Args: ranks: global ranks of this node, which run since `now_s`."""
        self._rules = list(rules)
        self._about = {rank: [rule for rule in rules if rule.is_about(rank, world_size)] for rank in ranks}
        self._clocks = Clocks()
        self._is_on: dict[tuple[str, int], bool] = {}
        self._judges: dict[tuple[str, int], Judge] = {}
        self._told: dict[str, set[int]] = {}
        self._lines: dict[int, int] = {}  # read so far, by rank
        self._fits: dict[tuple[str, int], int] = {}  # of them, for alarms
        self._no_numbers: set[str] = set()
        for rank, about in self._about.items():
            for rule in about:
                if rule.ranks != "any":
                    self._clocks.begin(rule, rank, now_s)

    @property
    def wants_lines(self) -> bool:
        """Whether there is a rule left for any rank of this node."""
        return any(self._about.values())

    def read(
        self, rank: int, lines: Sequence[str], now_s: float, limit: Limit = no_limit, are_beats: bool = False
    ) -> list[Outcome]:
        """What a rank has written, in whole lines.

        Args: limit: runs a search; None from it: it took too long; are_beats: they are its heartbeats.
        """
        outcomes: list[Outcome] = []
        lines = [line[:MOST_LINE_CHARACTERS] for line in lines]
        text = "\n".join(lines)
        self._lines[rank] = self._lines.get(rank, 0) + len(lines) * (not are_beats)
        for rule in list(self._about.get(rank, ())):
            if rule.is_of_heartbeats != are_beats or (rule.hints and not any(hint in text for hint in rule.hints)):
                continue
            hits = limit(lambda rule=rule: list(_search(rule, lines)))  # type: ignore[misc]
            if hits is None:
                outcomes += self._switch_off(rule, f"it takes too long on what rank {rank} prints")
            elif hits:
                outcomes += self._heed(rule, rank, hits, now_s)
        return outcomes

    def skipped(self, rank: int, now_s: float) -> list[Outcome]:
        """Some output of a rank was not read: what was awaited may have been there."""
        self._clocks.renew(rank, now_s)
        return [
            Seen(rule, "match") for rule in self._about.get(rank, ()) if rule.ranks == "any" and rule.has_clock
        ]

    def ended(self, rank: int) -> None:
        """A rank has ended, or its output cannot be read: nothing is awaited of it."""
        self._clocks.ended(rank)

    def tick(self, now_s: float) -> list[Outcome]:
        """What is late by now."""
        late = self._clocks.take_late(now_s)
        return [outcome for each in late for outcome in self._tell(each.rule, each.rank, each.why, again=True)]

    def _heed(self, rule: Rule, rank: int, hits: list[Hit], now_s: float) -> list[Outcome]:
        if rule.is_alarm and not rule.is_of_heartbeats and (why := self._fits_everything(rule, rank, hits)):
            return self._switch_off(rule, why)
        outcomes: list[Outcome] = []
        seen: dict[str, None] = {}  # in the order of their last lines
        value: float | None = None
        place = rule.name, ANY_RANK if rule.ranks == "any" else rank
        for hit in hits:
            is_on = self._is_on.get(place, not rule.start)
            if hit.what != "match":
                if is_on == (hit.what == "start"):
                    continue  # no news
                self._is_on[place] = hit.what == "start"
                if hit.what == "start":
                    self._clocks.started(rule, rank, now_s)
                else:
                    self._clocks.stopped(rule, rank)
            elif not is_on:
                continue
            elif rule.metric and (number := parse_number(hit.value)) is None:
                outcomes += self._tell_no_number(rule, hit)
                continue
            elif rule.metric and number is not None:
                value = number
                why = self._judges.setdefault((rule.name, rank), Judge(rule)).look(number)
                outcomes += self._tell(rule, rank, f"{why}: {_quote(hit.line)}") if why else ()
            elif rule.is_alarm:
                outcomes += self._tell(rule, rank, _quote(hit.line))
            if hit.what == "match":
                self._clocks.matched(rule, rank, now_s)
            seen.pop(hit.what, None)
            seen[hit.what] = None
        if value is not None:
            outcomes.append(Measured(rule, rank, value))
        if rule.ranks == "any" and rule.has_clock:
            outcomes += [Seen(rule, what) for what in seen]
        return outcomes

    def _fits_everything(self, rule: Rule, rank: int, hits: list[Hit]) -> str:
        lines = self._lines[rank]
        fits = self._fits.get((rule.name, rank), 0) + sum(hit.what == "match" for hit in hits)
        self._fits[rule.name, rank] = fits
        if lines < EVERYTHING_LINES or fits < EVERYTHING_SHARE * lines:
            return ""
        return f"it fits {fits} of the {lines} lines of rank {rank} so far, as {_quote(hits[0].line)}"

    def _tell(self, rule: Rule, rank: int, why: str, *, again: bool = False) -> list[Outcome]:
        told = self._told.setdefault(rule.name, set())
        if (rank in told and not again) or (rank not in told and len(told) >= MOST_RANKS_TOLD):
            return []
        told.add(rank)
        return [Found(rule, rank, why)]

    def _tell_no_number(self, rule: Rule, hit: Hit) -> list[Outcome]:
        if rule.name in self._no_numbers:
            return []
        self._no_numbers.add(rule.name)
        return [
            Found(
                rule._replace(action="report"), ANY_RANK, f"{_quote(hit.value)} is no number: {_quote(hit.line)}"
            )
        ]

    def _switch_off(self, rule: Rule, why: str) -> list[Outcome]:
        for about in self._about.values():
            if rule in about:
                about.remove(rule)
        self._clocks.drop(rule)
        return [Off(rule, why)]


def _search(rule: Rule, lines: Sequence[str]) -> Iterator[Hit]:
    """Lines that mean something. A line may be more than one thing: it ends, begins, and counts, in this order."""
    pattern = re.compile(rule.pattern).search
    start = re.compile(rule.start).search if rule.start else None
    stop = re.compile(rule.stop).search if rule.stop else None
    for line in lines:
        if stop is not None and stop(line):
            yield Hit("stop", line)
        if start is not None and start(line):
            yield Hit("start", line)
        if found := pattern(line):
            yield Hit("match", line, found[rule.metric] or "" if rule.metric else "")


def _quote(line: str) -> str:
    text = line.strip()
    return repr(text if len(text) <= MOST_SHOWN_CHARACTERS else text[: MOST_SHOWN_CHARACTERS - 3] + "...")
