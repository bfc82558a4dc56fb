"""PURE: the rules at the coordinator: what nodes found, in few words, and lines that some rank must print.

Every method returns what is to be told to all nodes and obeyed. Nodes may find the same a thousand times: of each
rule few findings are told in an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.rules.clocks import ANY_RANK, Clocks
from launcher.rules.rule import Rule

# Of lines for which it is enough that some rank prints them nodes tell at a look, and not of each.
ANY_LOOK_S = 2.0  # a node that has such rules looks at least so often
SEEN_SHARE = 0.1  # of the time within which a line must come: so often it is told that it came
NODES_A_SECOND = 250  # that may tell it, of a large job
SLACK_S = ANY_LOOK_S + 1.0
MOST_TOLD = 4  # findings of one rule in an attempt
NUMERIC = "numeric"  # the class of losses that are no numbers
MOST_NAMES = 256  # of rules that findings may name


def seen_every_s(rule: Rule, nodes: int) -> float:
    """Seconds between two words of a node about lines of such a rule, in a job of so many."""
    limits_s = [each for each in (rule.must_recur_within_s, rule.must_start_within_s) if each is not None]
    return max(nodes / NODES_A_SECOND, SEEN_SHARE * min(limits_s, default=0.0))


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
        who = f"rank {self.rank}: " if self.rank >= 0 else ""
        if who and self.kind == NUMERIC:
            who = f"the job (rank {self.rank} prints it): "  # all ranks have such a number
        return f"rule {self.rule!r}{kind}: {who}{self.why}"


class RuleWatch:
    """Of one job."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        """Args: rules: of the coordinator's own node; those about any rank, with a clock, are watched here."""
        self._rules = {rule.name: rule for rule in rules if rule.ranks == "any" and rule.has_clock}
        self._clocks = Clocks()  # of the attempt
        self._nodes = 0
        self._watching: dict[str, int] = {}  # nodes, by rule
        self._early: dict[str, list[str]] = {}  # what was seen before all nodes watch, by rule
        self._told: dict[str, int] = {}

    def attempt_began(self, nodes: int) -> None:
        """Other ranks, which do not run yet. Args: nodes: of the job."""
        self._nodes = nodes
        self._clocks = Clocks(SLACK_S + nodes / NODES_A_SECOND, SEEN_SHARE)
        self._watching.clear()
        self._early.clear()
        self._told.clear()

    def ranks_ended(self) -> None:
        """Those of one node: nothing is awaited any more, as they may have been the ones that print it."""
        self._clocks.ended(ANY_RANK)
        self._nodes = 0  # nor begun any more

    def seen(self, name: str, what: str, now_s: float) -> None:
        """What a node says of a rule. Nothing is awaited until all nodes watch, and once one cannot any more."""
        rule = self._rules.get(name)
        if rule is None:
            return
        watching = self._watching.get(name, 0)
        if what == "watch":
            self._watching[name] = watching + 1
            if watching + 1 == self._nodes:
                self._clocks.begin(rule, ANY_RANK, now_s)
                for each in self._early.pop(name, []):
                    self.seen(name, each, now_s)
        elif what == "blind":
            self._watching[name] = -self._nodes
            self._clocks.drop(rule)
        elif what not in ("start", "match", "stop"):
            return  # from outside
        elif watching < self._nodes:
            early = [each for each in self._early.get(name, []) if each != what]
            self._early[name] = [*early, what]
        elif what == "start":
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
