"""Rules at the coordinator: lines that some rank must print, and how many findings are told."""

from __future__ import annotations

import pytest

from launcher.rules.job_watch import (
    ANY_SCAN_S,
    MAX_NAMES,
    MAX_REPORTED,
    NODES_A_SECOND,
    SEEN_SHARE,
    SLACK_S,
    JobRuleFinding,
    RuleWatch,
    seen_every_s,
)
from launcher.rules.rule import Rule

STEP = Rule("step", "step", "restart", "any", must_start_within_s=10.0, must_recur_within_s=3.0)


# Later by this a word of a node may come, in a job of one.
SLACK = SLACK_S + 1 / NODES_A_SECOND
START_S, RECUR_S = 10.0 * (1 + SEEN_SHARE) + SLACK, 3.0 * (1 + SEEN_SHARE) + SLACK


def watching(*rules: Rule, nodes: int = 1, now_s: float = 0.0) -> RuleWatch:
    """All nodes see what their ranks print."""
    watch = RuleWatch(rules)
    watch.attempt_began(nodes)
    for rule in rules:
        for _ in range(nodes):
            watch.seen(rule.name, "watch", now_s)
    return watch


def test_time_counts_from_when_all_nodes_watch() -> None:
    watch = RuleWatch([STEP])
    watch.attempt_began(2)
    watch.seen("step", "watch", 100.0)
    assert watch.deadline_s() is None
    watch.seen("step", "watch", 105.0)
    slack_s = SLACK_S + 2 / NODES_A_SECOND
    assert watch.deadline_s() == pytest.approx(105.0 + 10.0 * (1 + SEEN_SHARE) + slack_s)
    (late,) = watch.tick(130.0)
    assert (late.rule, late.action, late.rank) == ("step", "restart", -1)
    assert late.line == "rule 'step': no matching line within 10 s of the ranks' start"
    assert watch.tick(1000.0) == []


def test_a_line_that_came_before_all_nodes_watch_has_come() -> None:
    rule = STEP._replace(must_recur_within_s=None, start="go")
    watch = RuleWatch([rule])
    watch.attempt_began(2)
    for what in ("watch", "start", "match", "watch"):
        watch.seen("step", what, 1.0)
    assert watch.deadline_s() is None
    assert watch.tick(1e6) == []


def test_a_node_whose_ranks_have_ended_before_all_watch() -> None:
    watch = RuleWatch([STEP])
    watch.attempt_began(2)
    watch.seen("step", "watch", 1.0)
    watch.ranks_ended()
    watch.seen("step", "watch", 2.0)
    assert watch.deadline_s() is None


def test_any_word_is_received_without_harm() -> None:
    watch = RuleWatch([STEP])
    watch.attempt_began(2)
    for number in range(1000):
        watch.seen("step", f"what{number}", 1.0)
    for _ in range(2):
        watch.seen("step", "watch", 2.0)
    assert [late.why for late in watch.tick(100.0)] == ["no matching line within 10 s of the ranks' start"]


def test_where_a_node_sees_nothing_nothing_is_awaited() -> None:
    watch = watching(STEP, nodes=3)
    assert watch.deadline_s() is not None
    watch.seen("step", "blind", 1.0)
    for what in ("match", "watch", "match", "blind", "watch"):
        watch.seen("step", what, 2.0)
    assert watch.deadline_s() is None
    watch.attempt_began(3)
    watch.seen("step", "watch", 3.0)
    watch.seen("step", "watch", 3.0)
    assert watch.deadline_s() is None, "the third one has said nothing"


def test_any_node_will_do() -> None:
    watch = watching(STEP)
    watch.seen("step", "match", 8.0)
    watch.seen("other", "match", 9.0)
    assert watch.deadline_s() == pytest.approx(8.0 + RECUR_S)
    watch.ranks_ended()
    assert watch.deadline_s() is None
    watch.attempt_began(1)
    watch.seen("step", "watch", 50.0)
    assert watch.deadline_s() == pytest.approx(50.0 + START_S)


def test_start_and_stop() -> None:
    watch = watching(STEP._replace(start="go", stop="halt"))
    assert watch.deadline_s() is None
    watch.seen("step", "start", 5.0)
    assert watch.deadline_s() == pytest.approx(5.0 + START_S)
    watch.seen("step", "stop", 6.0)
    assert watch.deadline_s() is None


def test_rules_of_nodes_are_not_watched_here() -> None:
    watch = watching(STEP._replace(ranks="all"))
    assert watch.deadline_s() is None


def test_few_findings_of_a_rule_are_reported_in_an_attempt() -> None:
    watch = watching()
    finding = JobRuleFinding("a", "", "report", 3, "what")
    assert [watch.is_news(finding) for _ in range(10)] == [True] * MAX_REPORTED + [False] * (10 - MAX_REPORTED)
    assert watch.is_news(finding._replace(rule="b"))
    watch.attempt_began(1)
    assert watch.is_news(finding)
    named = [watch.is_news(finding._replace(rule=str(number))) for number in range(2 * MAX_NAMES)]
    assert sum(named) == MAX_NAMES - 1


def test_a_finding_in_words() -> None:
    assert (
        JobRuleFinding("disk-full", "resource", "report", 3, "'x'").line
        == "rule 'disk-full' (resource): rank 3: 'x'"
    )


@pytest.mark.parametrize("nodes", [1, 10, 1000, 10_000])
@pytest.mark.parametrize("limit_s", [1.0, 10.0, 1000.0])
def test_a_line_that_comes_all_the_time_is_never_late(nodes: int, limit_s: float) -> None:
    """As rarely as a node may tell of it: after each look that is not sooner than its last word allows."""
    rule = STEP._replace(must_recur_within_s=limit_s)
    watch = watching(rule, nodes=nodes)
    now_s = reported_s = 0.0
    watch.seen("step", "match", now_s)
    for _ in range(200):
        now_s += ANY_SCAN_S
        assert watch.tick(now_s) == []
        if now_s >= reported_s + seen_every_s(rule, nodes):
            reported_s = now_s
            watch.seen("step", "match", now_s + 0.5)  # it was on its way
