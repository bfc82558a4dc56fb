"""What is slow: the answer on planted stragglers, and that nobody is named without a reason."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.report_job import Plan, Planted
from bootseer.report.analysis import analyse_job
from bootseer.report.report import make_report
from bootseer.report.slow_words import seconds, slow_lines
from bootseer.report.text import report_text
from tests.unit.bootseer.report.made_jobs import analysis_of, event, in_order, span, started


def places(plan: Plan) -> list[tuple[str, dict[str, tuple[int, ...]]]]:
    return [(each.stage, dict(each.places)) for each in analysis_of(plan).stragglers]


def test_one_slow_node_in_one_stage() -> None:
    plan = Plan(nodes=20, ranks=8, planted=(Planted("env", 36, 17),))
    found = analysis_of(plan)
    assert places(plan) == [("env", {"node0017": ()})]
    slow = found.stragglers[0]
    assert slow.seconds == pytest.approx(43, abs=0.6)
    assert slow.ratio == pytest.approx(6.1, abs=0.3)
    (line,) = slow_lines(found)
    assert line.startswith("env on node0017: 4")
    assert line.endswith("; all 8 ranks of node0017")
    assert f"{slow.ratio:.1f} times the median of {seconds(slow.median_s)}" in line


def test_one_slow_rank() -> None:
    plan = Plan(nodes=6, ranks=4, planted=(Planted("import", 20, 3, 2),))
    assert places(plan) == [("import", {"node0003": (14,)})]
    (line,) = slow_lines(analysis_of(plan))
    assert line.startswith("import of rank 14 on node0003: 2")
    assert line.endswith("; not the other 3 there")


def test_all_ranks_of_a_node_are_named_as_the_node() -> None:
    plan = Plan(nodes=6, ranks=4, planted=(Planted("import", 20, 3),))
    assert places(plan) == [("import", {"node0003": (12, 13, 14, 15)})]
    (line,) = slow_lines(analysis_of(plan))
    assert line.startswith("import on node0003: 2")
    assert line.endswith("; all 4 ranks of node0003")


@pytest.mark.parametrize("longer", [1.0, 3.0, 10.0])
def test_where_all_are_slow_alike_nobody_is_named(longer: float) -> None:
    stages = {name: took * longer for name, took in Plan().stages.items()}
    found = analysis_of(Plan(nodes=12, ranks=4, stages=stages))
    assert found.stragglers == []
    (line,) = slow_lines(found)
    assert line.startswith("nothing stands out; env took longest: ")
    assert line.endswith(" on 12 nodes")


def test_two_stages_the_dearer_first() -> None:
    plan = Plan(nodes=10, ranks=2, planted=(Planted("checkpoint", 9, 2), Planted("env", 20, 7)))
    assert places(plan) == [("env", {"node0007": ()}), ("checkpoint", {"node0002": (4, 5)})]
    first, second = slow_lines(analysis_of(plan))
    assert first.startswith("env on node0007")
    assert second.startswith("checkpoint on node0002")


def test_several_nodes_in_one_line() -> None:
    plan = Plan(nodes=30, ranks=2, planted=tuple(Planted("env", 10 + node, node) for node in (4, 9, 11, 20, 28)))
    (line,) = slow_lines(analysis_of(plan))
    assert line.startswith("env on 5 nodes (node0028, node0020, node0011 and 2 more): up to 4")
    assert line.endswith("all 10 ranks of these nodes")


def test_a_node_that_was_late() -> None:
    plan = Plan(nodes=5, planted=(Planted("late", 30, 4),))
    assert places(plan) == [("late", {"node0004": ()})]
    (line,) = slow_lines(analysis_of(plan))
    assert line.startswith("node0004 began 30.")
    # Without a common clock that cannot be seen, and nothing is made up.
    blind = Plan(nodes=5, planted=(Planted("late", 30, 4),), clocked=False)
    assert places(blind) == []


def test_of_two_nodes_the_slower_one() -> None:
    assert places(Plan(nodes=2, planted=(Planted("env", 30, 1),))) == [("env", {"node0001": ()})]


def test_who_waits_is_not_slow() -> None:
    # Three nodes of four are slow: the fast one waits in its script, and is not blamed for that.
    plan = Plan(nodes=4, planted=tuple(Planted("env", 30, node) for node in (1, 2, 3)))
    assert [stage for stage, _ in places(plan) if stage in ("first_step", "peers", "rendezvous")] == []


def test_a_rank_that_never_got_out_of_a_stage() -> None:
    events = [*span("spawn", 1, 1.1), *started(0, 1, 2), *started(1, 1, 2), *span("import", 2, 4, rank=1)]
    events += [*span("import", 2, None, rank=0), event(9, None, "instant", "rank_exited", 0, attrs={"status": -9})]
    events += [event(9.5, None, "instant", "rank_exited", 1, attrs={"status": -15})]
    lines = slow_lines(analyse_job(in_order(events)).attempts[0])
    assert lines[0] == (
        "rank 0 on a did not leave import: 7.0 s after it began it ended with status -9"
        " (1 more did not reach the first step)"
    )


@settings(max_examples=40, deadline=None)
@given(
    nodes=st.integers(3, 20),
    slow=st.integers(0, 19),
    seed=st.integers(0, 10**6),
    stage=st.sampled_from(["env", "image", "import", "checkpoint"]),
    extra=st.floats(15, 200),
)
def test_whatever_is_planted_is_found_and_nothing_else(
    nodes: int, slow: int, seed: int, stage: str, extra: float
) -> None:
    slow %= nodes
    plan = Plan(nodes=nodes, ranks=2, planted=(Planted(stage, extra, slow),), seed=seed)
    found = places(plan)
    assert [(name, list(where)) for name, where in found] == [(stage, [f"node{slow:04d}"])]


def test_seconds_for_people() -> None:
    assert [seconds(each) for each in (0, 0.0032, 0.42, 43.04, 999.9, 61_440)] == [
        "0 s", "3.2 ms", "0.42 s", "43.0 s", "999.9 s", "61,440 s",
    ]  # fmt: skip


def test_rules_that_were_broken() -> None:
    told = "rule 'loss' (numeric): the job (rank 7 prints it): loss is nan: 'loss=nan'"
    attrs = {"rule": "loss", "class": "numeric", "action": "restart", "of_rank": 7}
    events = [
        *started(0, 0.0, 1.0, 2.0, node="a"),
        event(3.0, None, "instant", "rule_broken", node="a", error=told, attrs=attrs),
    ]
    report = make_report(analyse_job(in_order(events)), 0)
    (row,) = report.rules
    assert (row.rule, row.kind, row.action, row.rank) == ("loss", "numeric", "restart", 7)
    assert f"  {told} (restart)" in report_text(report)
    assert not any("rule" in note for note in report.notes)
    assert [each.rank for each in report.rank_rows] == [0], "it is no event of that rank"


def test_hangs_of_all_attempts() -> None:
    told = "the job hangs (all-idle): rank 1 is in wait_for_lock (train.py:21)"
    events = [*started(0, 0.0, 1.0, 2.0, node="a"), *started(0, 100.0, 101.0, 102.0, node="a", attempt=1)]
    for at_s, attempt in ((62.0, 0), (162.0, 1)):
        attrs = {"report": f"standstill-{attempt}.txt"}
        events.append(event(at_s, None, "instant", "hang", node="a", error=told, attrs=attrs, attempt=attempt))
    for shown in (0, 1):
        report = make_report(analyse_job(in_order(events)), shown)
        assert [(each.attempt, each.report) for each in report.hangs] == [
            (0, "standstill-0.txt"),
            (1, "standstill-1.txt"),
        ]
        text = report_text(report)
        assert f"Hangs\n  attempt 0: noticed after 62.0 s: {told} (standstill-0.txt)\n  attempt 1: " in text
        assert not any("hang" in note for note in report.notes)


def test_what_health_checks_found() -> None:
    events = [*started(0, 0.0, 1.0, 2.0, node="a"), *started(1, 0.0, 1.0, 2.0, node="b")]
    for at_s, node, level, where, free in (
        (0.5, "a", "warn", "/data", 9), (0.6, "b", "warn", "/data", 8), (1.5, "a", "fail", "/", 0),
        (1.6, "b", "unknown", "", 0),
    ):  # fmt: skip
        attrs = {"check": "space", "level": level, "where": where, "what": "free"}
        line = f"{level:<7} space {where}: free ({free} B)"
        events.append(event(at_s, None, "instant", "check", node=node, error=line, attrs=attrs))
    report = make_report(analyse_job(in_order(sorted(events, key=lambda each: each.mono_ns))), 0)
    assert [(each.level, each.nodes) for each in report.checks] == [("fail", ["a"]), ("warn", ["a", "b"])]
    text = report_text(report)
    assert "Health checks" in text and "  fail    space /: free (0 B) (a)" in text
    assert not any("check" in note for note in report.notes)


def test_what_fell_back_and_what_it_cost() -> None:
    events = []
    for number, node in enumerate("abc"):
        took_s = 8.0 if node == "b" else 2.0
        events += [*span("image", 0.0, took_s, node=node), *started(number, took_s, took_s, took_s + 1, node=node)]
    why = "the image is unpacked, as it cannot be mounted here: no"
    events.append(event(0.5, "image", "instant", "fell_back", node="b", error=why))
    events.append(event(0.6, None, "instant", "fell_back", node="c", error="nodes do not help each other"))
    report = make_report(analyse_job(in_order(events)), 0)
    first, second = report.fallbacks
    assert (first.stage, first.nodes, first.longest_s, first.others_s) == ("image", ["b"], 8.0, 2.0)
    assert first.line == f"image: {why} (b); image took 8.0 s there, 2.0 s elsewhere"
    assert second.line == "nodes do not help each other (c)"
    assert not any("fell_back" in note for note in report.notes)
    assert f"  {first.line}" in report_text(report) and "Fell back to the normal path" in report_text(report)
