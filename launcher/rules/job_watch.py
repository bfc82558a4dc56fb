"""PURE: the rules at the coordinator: findings of nodes, and lines that some rank must print.

Methods return findings to send to all nodes and to act on. A thousand nodes may find the same: few findings of
each rule are reported in an attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from launcher.rules.clocks import ANY_RANK, LineDeadlines
from launcher.rules.rule import Rule

# If it is enough that any rank prints a line, nodes report it once a scan, not for each line.
ANY_SCAN_S = 2.0  # a node with such rules scans at least so often
SEEN_SHARE = 0.1  # of the time limit of a line: the interval of reports that it was printed
NODES_A_SECOND = 250  # that may report it, in a large job
SLACK_S = ANY_SCAN_S + 1.0
MAX_REPORTED = 4  # reported findings of one rule in an attempt
NUMERIC = "numeric"  # the class of losses that are not numbers
MAX_NAMES = 256  # different rule names in findings


def seen_every_s(rule: Rule, nodes: int) -> float:
    """Return the seconds between two reports of a node about such a rule, in a job of so many nodes."""
    limits_s = [each for each in (rule.must_recur_within_s, rule.must_start_within_s) if each is not None]
    return max(nodes / NODES_A_SECOND, SEEN_SHARE * min(limits_s, default=0.0))


class JobRuleFinding(NamedTuple):
    rule: str
    kind: str  # a class of failure, "" for none
    action: str
    rank: int  # -1: none in particular
    why: str

    @property
    def line(self) -> str:
        kind = f" ({self.kind})" if self.kind else ""
        who = f"rank {self.rank}: " if self.rank >= 0 else ""
        if who and self.kind == NUMERIC:
            who = f"the job (rank {self.rank} prints it): "  # the number is the same on all ranks
        return f"rule {self.rule!r}{kind}: {who}{self.why}"


class RuleWatch:
    """The rules of one job at its coordinator."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        """Args: rules: of the coordinator's node; those about any rank, with a clock, are watched here."""
        self._rules = {rule.name: rule for rule in rules if rule.ranks == "any" and rule.has_clock}
        self._clocks = LineDeadlines()  # of the attempt
        self._nodes = 0
        self._watching: dict[str, int] = {}  # nodes, by rule
        self._early: dict[str, list[str]] = {}  # lines reported before all nodes watch, by rule
        self._reported: dict[str, int] = {}

    def attempt_began(self, nodes: int) -> None:
        """Begin an attempt, whose ranks do not run yet. Args: nodes: number of nodes of the job."""
        self._nodes = nodes
        self._clocks = LineDeadlines(SLACK_S + nodes / NODES_A_SECOND, SEEN_SHARE)
        self._watching.clear()
        self._early.clear()
        self._reported.clear()

    def ranks_ended(self) -> None:
        """Stop all clocks when ranks of a node have ended: they may be the ranks that print the line."""
        self._clocks.ended(ANY_RANK)
        self._nodes = 0  # no clock begins any more

    def seen(self, name: str, what: str, now_s: float) -> None:
        """Handle a node's message about a rule. Clocks run only while all nodes watch the rule."""
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
            return  # invalid input from a node
        elif watching < self._nodes:
            early = [each for each in self._early.get(name, []) if each != what]
            self._early[name] = [*early, what]
        elif what == "start":
            self._clocks.started(rule, ANY_RANK, now_s)
        elif what == "stop":
            self._clocks.stopped(rule, ANY_RANK)
        else:
            self._clocks.matched(rule, ANY_RANK, now_s)

    def is_news(self, finding: JobRuleFinding) -> bool:
        """Return whether to report a finding, or enough were reported. Its action is taken in both cases."""
        if finding.rule not in self._reported and len(self._reported) >= MAX_NAMES:
            return False
        count = self._reported[finding.rule] = self._reported.get(finding.rule, 0) + 1
        return count <= MAX_REPORTED

    def deadline_s(self) -> float | None:
        """Return when to call `tick`."""
        return self._clocks.deadline_s()

    def tick(self, now_s: float) -> list[JobRuleFinding]:
        """Return findings for lines that are late now."""
        return [
            JobRuleFinding(late.rule.name, late.rule.kind, late.rule.action, ANY_RANK, late.why)
            for late in self._clocks.take_late(now_s)
        ]
