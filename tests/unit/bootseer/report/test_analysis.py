"""Starts, pieces, the critical path and what was lost: by examples, and on any events at all."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.report_job import Plan, Planted, make_lines
from bootseer.errors import UsageError
from bootseer.events import RANK_EXITED, RANK_STARTED, SCRIPT, Event, Kind, Stage
from bootseer.report.analysis import Analysis, analyse_job
from bootseer.report.pieces import end_of
from bootseer.report.report import encode, make_report, stage_rows
from bootseer.report.text import report_text
from tests.unit.bootseer.report.made_jobs import analysis_of, event, in_order, span, started, to_event


def steps(found: Analysis) -> list[tuple[str, str, int | None, float, float]]:
    return [
        (each.label, each.node, each.rank, round(each.begin_ns / 1e9, 3), round(each.end_ns / 1e9, 3))
        for each in found.path
    ]


def labels(found: Analysis, rank: int) -> list[tuple[str, float, float]]:
    (own,) = [pieces for each, pieces in found.pieces.items() if each.rank == rank]
    return [(label, round(begin / 1e9, 3), round(end / 1e9, 3)) for label, begin, end in own]


def test_a_moment_counts_for_the_stage_that_decided() -> None:
    events = [
        *span("rendezvous", 0, 0.5), *span("image", 0.1, 2), *span("env", 0.2, 5), *span("caches", 5.5, 6),
        *span("checkpoint", 1, 20), *span("spawn", 6, 6.1), *started(0, 6, 7, 12), *span("import", 7.5, 10, 0),
    ]  # fmt: skip
    found = analyse_job(in_order(events)).attempts[0]
    assert labels(found, 0) == [
        ("rendezvous", 0, 0.1),
        ("image", 0.1, 0.2),
        ("env", 0.2, 5),
        ("checkpoint", 5, 5.5),  # still open when ranks were started: only where nothing else was
        ("caches", 5.5, 6),
        ("spawn", 6, 7),
        ("first_step", 7, 7.5),
        ("import", 7.5, 10),
        ("first_step", 10, 12),
    ]
    assert found.first_step_s == 12
    assert found.lost.total_s == 12
    assert {stage.stage: round(stage.median_s, 3) for stage in found.stages} == {
        "image": 1.9, "env": 4.8, "caches": 0.5, "rendezvous": 0.5, "spawn": 1, "import": 2.5, "checkpoint": 19,
        "first_step": 2.5,
    }  # fmt: skip


def test_the_way_leads_to_the_rank_that_came_last() -> None:
    found = analysis_of(Plan(nodes=3, ranks=2, planted=(Planted("import", 20, 1, 1),)))
    labels_on_path = [(label, node, rank) for label, node, rank, _, _ in steps(found)]
    assert ("import", "node0001", 3) in labels_on_path
    assert [each for each in labels_on_path if each[0] in ("env", "caches")] == [
        ("env", "node0001", None),
        ("caches", "node0001", None),
    ]
    assert found.lost.straggler_s == pytest.approx(20, abs=1.0)
    waited = [seconds for rank, seconds in found.waited_s.items() if rank.rank != 3]
    assert min(waited) > 18


def test_ranks_that_do_not_wait_for_each_other_do_not_lead_to_each_other() -> None:
    events = [*span("spawn", 0, 0.1)]
    for rank, took in ((0, 5), (1, 40)):
        events += started(rank, 0, 1, 61 + took)
        events += span("import", 1, 1 + took, rank)
    found = analyse_job(in_order(events)).attempts[0]
    assert sum(found.waited_s.values()) == 0
    events = [each for each in events if not (each.stage == "first_step" and each.rank == 0)]
    events.append(event(101.02, "first_step", "instant", "optimizer_step", 0))
    found = analyse_job(in_order(events)).attempts[0]
    assert {rank.rank: seconds for rank, seconds in found.waited_s.items()} == {0: 35, 1: 0}
    assert [each[:3] for each in steps(found)][-2:] == [("import", "a", 1), ("first_step", "a", 0)]


def test_a_node_that_waited_leads_to_the_one_that_was_busy() -> None:
    events = []
    for node, rank, env in (("a", 0, 3.0), ("b", 1, 30.0)):
        events += span("rendezvous", 0, 1, node=node)
        events += span("env", 0.1, env, node=node)
        events += span("spawn", 30.2, 30.3, node=node)  # shown together
        events += started(rank, 30.2, 31, 33 + (rank == 0) * 0.01, node=node)
    found = analyse_job(in_order(events)).attempts[0]
    assert steps(found) == [
        ("rendezvous", "b", None, 0, 0.1),
        ("env", "b", None, 0.1, 30),
        ("waiting", "a", None, 30, 30.2),
        ("spawn", "a", 0, 30.2, 31),
        ("first_step", "a", 0, 31, 33.01),
    ]
    # Without the coordinator's time each node is on its own.
    blind = analyse_job(in_order(each._replace(job_ns=None, job_error_ns=None) for each in events)).attempts[0]
    assert not blind.start.is_clocked
    assert [each[:3] for each in steps(blind)][:3] == [
        ("rendezvous", "a", None),
        ("env", "a", None),
        ("waiting", "a", None),
    ]


def test_durations_are_those_of_a_node_though_the_estimate_of_its_clock_changes() -> None:
    events = [*span("env", 0, 5), *span("spawn", 5, 5.1), *started(0, 5, 6, 8)]
    events += [*span("env", 0, 4, node="b"), *span("spawn", 5, 5.1, node="b"), *started(1, 5, 6, 8, node="b")]
    moved = [
        each._replace(job_ns=(each.job_ns or 0) + shift * 10**6, job_error_ns=abs(shift) * 10**6)
        for shift, each in zip([40, -30, 20, -7, 3, 10, -9, 1, 5, 4, 3, 2, 1, 9], events, strict=False)
    ]
    found = analyse_job(in_order(moved)).attempts[0]
    assert [(each.node, each.seconds) for stage in found.stages if stage.stage == "env" for each in stage.all] == [
        ("a", 5.0),
        ("b", 4.0),
    ]


def test_a_clock_that_is_not_known_is_not_used() -> None:
    events = [*span("env", 0, 5), *started(0, 5, 6, 8)]
    events += [
        each._replace(job_error_ns=2**61) for each in [*span("env", 3, 5, node="b"), *started(1, 5, 6, 8, "b")]
    ]
    job = analyse_job(in_order(events))
    assert not job.attempts[0].start.is_clocked
    assert "late" not in {stage.stage for stage in job.attempts[0].stages}
    assert any("b: not on the coordinator's clock" in note for note in make_report(job, 0).notes)


def test_stages_that_are_not_known_are_shown_as_such() -> None:
    events = [*span("polish", 0, 5), *span("spawn", 5, 5.1), *started(0, 5, 6, 8)]
    found = analyse_job(in_order(events)).attempts[0]
    assert labels(found, 0)[0] == ("other", 0, 5)
    assert found.start.nodes[0].spans[0].name == "polish: polish"


def test_what_has_no_stage_is_no_part_of_the_start() -> None:
    recorded = [each._replace(stage=None, attrs={"files": 7}) for each in span("recorded", 1, 4)]
    events = [*recorded, *span("env", 0, 5), *span("spawn", 5, 5.1), *started(0, 5, 6, 8)]
    job = analyse_job(in_order(events))
    assert [label for label, _, _ in labels(job.attempts[0], 0)] == ["env", "spawn", "first_step"]
    assert [(fact.name, fact.max) for fact in make_report(job, 0).facts] == [("recorded_files", 7)]


def test_the_last_start_in_files_that_were_used_before() -> None:
    first = [*span("rendezvous", 0, 0.1), *span("spawn", 0.1, 0.2), *started(0, 0.1, 1, 50)]
    second = [*span("rendezvous", 100, 100.1), *span("spawn", 100.1, 100.2), *started(0, 100.1, 101, 103)]
    job = analyse_job(in_order([*first, *second]))
    assert job.attempts[0].first_step_s == 3
    assert any("older start" in note for note in make_report(job, 0).notes)


def test_the_pause_before_a_restart_is_no_rendezvous() -> None:
    first = [*span("rendezvous", 0, 0.1), *span("spawn", 0.1, 0.2), *started(0, 0.1, 1, 50)]
    met = [*span("rendezvous", 100, 100.1), *span("backoff", 100.1, 102.1), *span("rendezvous", 102.1, 102.2)]
    again = [*met, *span("spawn", 102.2, 102.3), *started(0, 102.2, 103, 104)]
    for events in (again, [*first, *again]):
        found = analyse_job(in_order(events)).attempts[0]
        assert found.first_step_s == 4, "also in files that were used before"
        assert {each.stage: round(each.max_s, 3) for each in stage_rows(found)} == {
            "backoff": 2.0, "rendezvous": 0.2, "spawn": 0.8, "first_step": 1.0,
        }  # fmt: skip
        assert "backoff" in [each.label for each in found.path]
        assert not found.stragglers


def test_two_agents_of_one_host_are_one_node() -> None:
    one = [*span("env", 0, 3), *span("spawn", 3, 3.1), *started(0, 3, 4, 9)]
    two = [*span("env", 0, 5), *span("spawn", 5, 5.1), *started(1, 5, 6, 9.01)]
    found = analyse_job(in_order([*one, *two])).attempts[0]
    assert found.start.older == 0
    assert {rank.rank: rank.spawn_ns for rank in found.start.ranks} == {0: 3 * 10**9, 1: 5 * 10**9}
    assert sorted((each.begin_ns, each.end_ns) for each in found.start.nodes[0].spans if each.stage == "env") == [
        (0, 3 * 10**9),
        (0, 5 * 10**9),
    ]


def test_what_did_not_get_into_the_run_file_is_said() -> None:
    lost = event(9, None, "scalar", "events_dropped", attempt=None, value=1200, attrs={"rate": 1199, "torn": 1})
    job = analyse_job(in_order([*span("spawn", 0, 0.1), *started(0, 0, 1, 2), lost]))
    assert "1,200 events of a did not get into the run file (rate, torn)" in make_report(job, 0).notes


def test_attempts_are_apart() -> None:
    plan = Plan(nodes=2)
    again = [
        each._replace(attempt=1, mono_ns=each.mono_ns + 100 * 10**9, job_ns=(each.job_ns or 0) + 100 * 10**9)
        for each in map(to_event, make_lines(plan))
        if each.stage not in ("env", "image", "caches")
    ]
    job = analyse_job(in_order([*map(to_event, make_lines(plan)), *again]))
    assert sorted(job.attempts) == [0, 1]
    report = make_report(job, 1)
    assert [row.attempt for row in report.attempts] == [0, 1]
    assert {row.stage for row in report.stages} == {"late", "rendezvous", "spawn", "import", "checkpoint",
                                                    "first_step", "peers"}  # fmt: skip
    assert "Attempts" in report_text(report)


def test_nothing_to_report_on() -> None:
    with pytest.raises(UsageError, match="contain no start"):
        analyse_job([event(0, None, "instant", "x", attempt=None)])


def test_what_was_not_observed_is_said() -> None:
    unhooked = [event(1, "spawn", "instant", "rank_started", 1), *started(0, 1, 2, 5)]
    events = [
        *span("spawn", 1, 1.1, attrs={"ranks": 2, "world_size": 8}),
        *unhooked,
        event(3, None, "instant", "not_observed", 1, error="an old torch"),
    ]
    job = analyse_job(in_order(events))
    report = make_report(job, 0)
    assert report.first_step_s is None
    assert report.first_steps == 1
    assert "first step observed on 1 of 2 ranks: an old torch" in report.notes
    assert "1 of 2 ranks wrote no event from their script" in report.notes
    assert any(note.startswith("these are 2 of the 8 ranks of the job: ") for note in report.notes)
    assert report.lost.ranks == 1
    assert "1 rank without a first step" in report_text(report)


anything = st.builds(
    Event,
    wall_ns=st.integers(0, 10**12),
    mono_ns=st.integers(0, 10**11),
    run_id=st.just("r"),
    node=st.sampled_from("abc"),
    rank=st.none() | st.integers(0, 3),
    attempt=st.none() | st.integers(0, 1),
    stage=st.none() | st.sampled_from([stage.value for stage in Stage]) | st.just("other stage"),
    kind=st.sampled_from([kind.value for kind in Kind]),
    name=st.sampled_from([RANK_STARTED, RANK_EXITED, SCRIPT, "x"]),
    span=st.none() | st.sampled_from("xyz"),
    value=st.none() | st.floats() | st.text(max_size=3),
    error=st.none() | st.just("failed"),
    attrs=st.just({}) | st.just({"status": 1, "how": "fork", "bytes": 3, "hit": True}),
    job_ns=st.none() | st.integers(0, 10**11),
    job_error_ns=st.none() | st.integers(0, 10**6) | st.just(2**61),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(anything, max_size=40))
def test_of_any_events(events: list[Event]) -> None:
    try:
        job = analyse_job(in_order(events))
    except UsageError:
        assert all(each.attempt is None for each in events)
        return
    for number, found in job.attempts.items():
        for rank, pieces in found.pieces.items():
            reached = 0
            for piece in pieces:
                assert piece.begin_ns == reached < piece.end_ns
                reached = piece.end_ns
            assert reached == end_of(rank)
        assert sum(found.lost.by_label.values()) == pytest.approx(found.lost.total_s)
        assert all(each.seconds >= 0 for stage in found.stages for each in stage.all)
        if found.lost.ranks:
            reached = 0
            for step in found.path:
                assert step.begin_ns == reached < step.end_ns
                reached = step.end_ns
            assert reached == max(end_of(rank) for rank in found.start.ranks if rank.first_step_ns is not None)
        assert found.lost.straggler_s <= found.start_s + 1e-6
        report = make_report(job, number)
        assert report_text(report)
        assert encode(report)


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_order_of_lines_does_not_matter(chance: random.Random) -> None:
    plan = Plan(nodes=3, ranks=2, planted=(Planted("import", 9, 1, 0),))
    events = [to_event(line) for line in make_lines(plan)]
    expected = encode(make_report(analyse_job(in_order(events)), 0))
    chance.shuffle(events)
    assert encode(make_report(analyse_job(in_order(events)), 0)) == expected
