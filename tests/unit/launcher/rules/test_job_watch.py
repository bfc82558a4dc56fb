"""Rules at the coordinator: lines that some rank must print, and how many findings are told."""

from __future__ import annotations

from launcher.rules.job_watch import MOST_NAMES, MOST_TOLD, Finding, RuleWatch
from launcher.rules.rule import Rule

STEP = Rule("step", "step", "restart", "any", must_start_within_s=10.0, must_recur_within_s=3.0)


def watch_of(*rules: Rule) -> RuleWatch:
    watch = RuleWatch(rules)
    watch.attempt_began()
    return watch


def test_time_counts_from_the_last_nodes_start() -> None:
    watch = watch_of(STEP)
    assert watch.deadline_s() is None
    watch.ranks_started(100.0)
    watch.ranks_started(105.0)
    assert watch.deadline_s() == 115.0
    (late,) = watch.tick(115.0)
    assert (late.rule, late.action, late.rank) == ("step", "restart", -1)
    assert late.line == "rule 'step': no line that fits within 10 s of the ranks' start"
    assert watch.tick(1000.0) == []


def test_any_node_will_do() -> None:
    watch = watch_of(STEP)
    watch.ranks_started(0.0)
    watch.seen("step", "match", 8.0)
    watch.seen("other", "match", 9.0)
    assert watch.deadline_s() == 11.0
    watch.ranks_ended()
    assert watch.deadline_s() is None
    watch.attempt_began()
    watch.ranks_started(50.0)
    assert watch.deadline_s() == 60.0


def test_start_and_stop() -> None:
    watch = watch_of(STEP._replace(start="go", stop="halt"))
    watch.ranks_started(0.0)
    assert watch.deadline_s() is None
    watch.seen("step", "start", 5.0)
    assert watch.deadline_s() == 15.0
    watch.seen("step", "stop", 6.0)
    assert watch.deadline_s() is None


def test_rules_of_nodes_are_not_watched_here() -> None:
    watch = watch_of(STEP._replace(ranks="all"))
    watch.ranks_started(0.0)
    assert watch.deadline_s() is None


def test_few_findings_of_a_rule_are_told_in_an_attempt() -> None:
    watch = watch_of()
    finding = Finding("a", "", "report", 3, "what")
    assert [watch.is_news(finding) for _ in range(10)] == [True] * MOST_TOLD + [False] * (10 - MOST_TOLD)
    assert watch.is_news(finding._replace(rule="b"))
    watch.attempt_began()
    assert watch.is_news(finding)
    named = [watch.is_news(finding._replace(rule=str(number))) for number in range(2 * MOST_NAMES)]
    assert sum(named) == MOST_NAMES - 1


def test_a_finding_in_words() -> None:
    assert Finding("disk-full", "resource", "report", 3, "'x'").line == "rule 'disk-full' (resource): rank 3: 'x'"
