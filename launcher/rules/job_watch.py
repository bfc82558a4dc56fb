"""PURE: the rules at the coordinator: what nodes found, in few words, and lines that some rank must print.

Every method returns what is to be told to all nodes and obeyed. Nodes may find the same a thousand times: of each
rule few findings are told in an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.rules.clocks import ANY_RANK, Clocks
from launcher.rules.rule import Rule

MOST_TOLD = 4  # findings of one rule in an attempt
MOST_NAMES = 256  # of rules that findings may name


class Finding(NamedTuple):
    """A broken rule."""

    rule: str
    kind: str  # a class of failure, "" for none
    action: str
    rank: int  # -1: none in particular
    why: str

    @property
    def line(self) -> str:
        """For people."""
        kind = f" ({self.kind})" if self.kind else ""
        return f"rule {self.rule!r}{kind}: {f'rank {self.rank}: ' if self.rank >= 0 else ''}{self.why}"


class RuleWatch:
    """Of one job."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        """Args: rules: of the coordinator's own node; those about any rank, with a clock, are watched here."""
        self._rules = {rule.name: rule for rule in rules if rule.ranks == "any" and rule.has_clock}
        self._clocks = Clocks()
        self._has_begun = False
        self._told: dict[str, int] = {}

    def attempt_began(self) -> None:
        """Other ranks, which do not run yet."""
        self._clocks = Clocks()
        self._has_begun = False
        self._told.clear()

    def ranks_started(self, now_s: float) -> None:
        """Those of one more node: times count from the last."""
        if self._has_begun:
            self._clocks.renew(ANY_RANK, now_s)
            return
        self._has_begun = True
        for rule in self._rules.values():
            self._clocks.begin(rule, ANY_RANK, now_s)

    def ranks_ended(self) -> None:
        """Those of one node: nothing is awaited any more, as they may have been the ones that print it."""
        self._clocks.ended(ANY_RANK)

    def seen(self, name: str, what: str, now_s: float) -> None:
        """A line that some rank has printed."""
        rule = self._rules.get(name)
        if rule is None:
            return
        if what == "start":
            self._clocks.started(rule, ANY_RANK, now_s)
        elif what == "stop":
            self._clocks.stopped(rule, ANY_RANK)
        else:
            self._clocks.matched(rule, ANY_RANK, now_s)

    def is_news(self, finding: Finding) -> bool:
        """Whether it is to be told; else there were enough of its kind. What it asks for is done in any case."""
        if finding.rule not in self._told and len(self._told) >= MOST_NAMES:
            return False
        count = self._told[finding.rule] = self._told.get(finding.rule, 0) + 1
        return count <= MOST_TOLD

    def deadline_s(self) -> float | None:
        """When `tick` has something to do."""
        return self._clocks.deadline_s()

    def tick(self, now_s: float) -> list[Finding]:
        """The time has come: what is late."""
        return [
            Finding(late.rule.name, late.rule.kind, late.rule.action, ANY_RANK, late.why)
            for late in self._clocks.take_late(now_s)
        ]
