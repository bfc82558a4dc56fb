"""What a start was made of, from events."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.events import RANK_STARTED, SCRIPT, Event, Kind, Stage
from bootseer.report.stages import _total_s
from bootseer.startup import StageTime, start_line, summarise_start

S = 10**9
BASE = {"a": 1000 * S, "b": 5 * S}  # clocks of nodes have nothing in common


def event(
    at_s: float,
    stage: str | None,
    kind: str,
    name: str,
    rank: int | None = None,
    node: str = "a",
    span: str | None = None,
    attempt: int | None = 0,
) -> Event:
    return Event(0, BASE[node] + round(at_s * S), "run", node, rank, attempt, stage, kind, name, span=span)


def span(stage: str, begin_s: float, end_s: float, rank: int | None = None, node: str = "a") -> list[Event]:
    return [
        event(begin_s, stage, "begin", stage, rank, node, span=f"{stage}{begin_s}"),
        event(end_s, stage, "end", stage, rank, node, span=f"{stage}{begin_s}"),
    ]


def agent(ranks: tuple[int, ...] = (0, 1), node: str = "a") -> list[Event]:
    return [
        *span("rendezvous", 0, 0.01, node=node),
        *span("spawn", 0.01, 0.02, node=node),
        *(event(0.015, "spawn", "instant", RANK_STARTED, rank, node) for rank in ranks),
    ]


def rank(
    number: int, script_s: float, import_s: float, first_step_s: float | None = None, node: str = "a"
) -> list[Event]:
    found = [event(script_s, "spawn", "instant", SCRIPT, number, node)]
    found += span("import", script_s + 0.01, script_s + 0.01 + import_s, number, node)
    if first_step_s is not None:
        found.append(event(first_step_s, "first_step", "instant", "optimizer_step", number, node))
    return found


def test_a_whole_start() -> None:
    summary = summarise_start([*rank(1, 0.04, 1.41, 1.93), *agent(), *rank(0, 0.03, 1.2, 1.9)])
    assert (summary.ranks, summary.nodes, summary.first_steps, summary.hooked) == (2, 1, 2, 2)
    assert summary.first_step_s == 1.93
    assert summary.running_s == 0.04
    assert [(each.stage, round(each.seconds, 3), each.rank) for each in summary.stages] == [
        ("rendezvous", 0.01, None),
        ("spawn", 0.03, 1),
        ("import", 1.41, 1),
        ("first_step", 0.67, 0),
    ]
    assert start_line(summary) == (
        "2 ranks on 1 node started in 1.93 s to the first step; longest stage: import 1.41 s (rank 1)"
    )


def test_the_rest_until_the_first_step_is_a_stage_of_its_own() -> None:
    summary = summarise_start([*agent((0,)), *rank(0, 0.04, 1, 500)])
    assert summary.longest == StageTime("first_step", 498.96, "a", 0)
    assert start_line(summary) == (
        "1 rank on 1 node started in 500 s to the first step; longest stage: first_step 499 s (rank 0)"
    )


def test_no_first_step() -> None:
    summary = summarise_start([*agent(), *rank(0, 0.03, 1), *rank(1, 0.04, 1)])
    assert summary.first_step_s is None
    assert start_line(summary) == (
        "2 ranks on 1 node running after 0.04 s; longest stage: import 1.00 s (rank 0); "
        "first step not observed (no torch optimizer step, no bootseer.heartbeat)"
    )


def test_some_first_steps() -> None:
    line = start_line(summarise_start([*agent(), *rank(0, 0.03, 1, 2), *rank(1, 0.04, 1)]))
    assert line.endswith("; first step observed on 1 of 2 ranks only")


def test_without_hooks() -> None:
    assert start_line(summarise_start(agent())) == (
        "2 ranks on 1 node running after 0.01 s; longest stage: rendezvous 0.01 s; "
        "first step not observed (no events of the ranks)"
    )


def test_a_rank_that_is_only_half_known_makes_nothing_up() -> None:
    summary = summarise_start(rank(0, 1, 1, 3))
    assert (summary.running_s, summary.first_step_s) == (None, None)
    assert start_line(summary).startswith("1 rank on 1 node started, its duration was not observed; ")


def test_nodes_are_measured_by_their_own_clocks() -> None:
    summary = summarise_start([*agent((0,)), *agent((1,), "b"), *rank(0, 0.03, 1, 2), *rank(1, 0.04, 2, 3, "b")])
    assert (summary.nodes, summary.first_step_s) == (2, 3.0)
    assert start_line(summary) == (
        "2 ranks on 2 nodes started in 3.00 s to the first step; longest stage: import 2.00 s (rank 1 on b)"
    )


def test_an_open_span_has_no_duration() -> None:
    events = [*agent((0,)), event(0.03, "spawn", "instant", SCRIPT, 0), event(0.1, "import", "begin", "torch", 0)]
    assert [each.stage for each in summarise_start(events).stages] == ["rendezvous", "spawn"]


def test_only_the_attempt_asked_for() -> None:
    first = [*agent(), *rank(0, 0.03, 1, 2), *rank(1, 0.03, 1, 2)]
    begin = event(9, "rendezvous", "begin", "join", span="again", attempt=None)  # not known yet then
    end = event(9.5, "rendezvous", "end", "join", span="again", attempt=1)
    second = [begin, end, event(10, "spawn", "instant", RANK_STARTED, 0, attempt=1)]
    second.append(event(11, "first_step", "instant", "heartbeat", 0, attempt=1))
    summary = summarise_start([*first, *second], attempt=1)
    assert (summary.ranks, summary.running_s, summary.first_step_s) == (1, 1.0, 2.0)
    assert summarise_start([*first, *second], attempt=0).first_step_s == 2.0


def test_a_span_of_another_attempt_is_none_of_this_one_whatever_its_id() -> None:
    again = [
        each._replace(attempt=1, mono_ns=each.mono_ns + 60 * S) for each in [*agent((0,)), *rank(0, 0.03, 1, 2)]
    ]
    summary = summarise_start([*agent((0,)), *rank(0, 0.03, 1, 3), *again], attempt=1)
    assert (summary.running_s, summary.first_step_s) == (0.03, 2.0)
    assert {each.stage: each.seconds for each in summary.stages}["rendezvous"] == 0.01


def test_no_events() -> None:
    summary = summarise_start([])
    assert summary.ranks == 0
    assert start_line(summary)


def test_overlapping_spans_count_once() -> None:
    assert _total_s([(0, 4 * S), (1 * S, 2 * S), (3 * S, 5 * S), (7 * S, 8 * S)]) == 6
    assert _total_s([(0, 4 * S), (7 * S, 9 * S)], 3 * S, 8 * S) == 2
    assert _total_s([]) == 0


anything = st.builds(
    Event,
    wall_ns=st.integers(),
    mono_ns=st.integers(),
    run_id=st.just("r"),
    node=st.sampled_from("ab"),
    rank=st.none() | st.integers(0, 2),
    attempt=st.none() | st.integers(0, 1),
    stage=st.none() | st.sampled_from([stage.value for stage in Stage]) | st.just("other"),
    kind=st.sampled_from([kind.value for kind in Kind]),
    name=st.sampled_from([RANK_STARTED, SCRIPT, "x"]),
    span=st.none() | st.sampled_from("xy"),
    attrs=st.just({}),
)


@given(st.lists(anything))
def test_any_events_make_a_line(events: list[Event]) -> None:
    summary = summarise_start(events, 0)
    assert start_line(summary)
    assert all(each.seconds >= 0 for each in summary.stages)
