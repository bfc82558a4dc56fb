"""Root causes of hangs: a small simulator runs ranks until nothing moves; what it planted has to be named."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.hangs.calls import Call, Group, RankTrace, find_order_break, name_ranks
from bootseer.hangs.stuck import CauseKind, Certainty, as_record, describe, find_causes, find_mismatches
from bootseer.hangs.wait_graph import find_roots, find_waits

STEPS = 6

# One action of a rank: operation, group, peer (-1), tag, bytes. "stop" ends its program there.
Action = tuple[str, Group, int, int, int]
Program = list[Action]


class Layout:
    """Stages of a pipeline, each with data-parallel ranks; rank = stage * width + place."""

    def __init__(self, depth: int, width: int) -> None:
        self.depth, self.width, self.size = depth, width, depth * width
        self.world = Group("0", "default_pg", 1, tuple(range(self.size)))
        self.pipes = [Group(f"p{at}", "pp", 1, tuple(range(at, self.size, width))) for at in range(width)]
        self.datas = [
            Group(f"d{at}", "dp", 1, tuple(range(at * width, at * width + width))) for at in range(depth)
        ]

    def step(self, rank: int) -> Program:
        """Forward and backward through the pipeline, gradients in the stage, the loss among all."""
        stage, place = divmod(rank, self.width)
        pp, dp = self.pipes[place], self.datas[stage]
        actions: Program = []
        if stage > 0:
            actions.append(("recv", pp, rank - self.width, 0, 64))
        if stage < self.depth - 1:
            actions += [("send", pp, rank + self.width, 0, 64), ("recv", pp, rank + self.width, 0, 64)]
        if stage > 0:
            actions.append(("send", pp, rank - self.width, 0, 64))
        return [*actions, ("all_reduce", dp, -1, 0, 4000), ("all_reduce", self.world, -1, 0, 4)]


def simulate(programs: Sequence[Program], ended: Sequence[int] = (), idle: Sequence[int] = ()) -> list[RankTrace]:
    """Every call blocks until all have come, but those of ranks in `idle`, for which nobody waits."""
    calls: list[list[Call]] = [[] for _ in programs]
    clock = 0
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while True:
                made = calls[rank]
                if made and made[-1].is_open() and rank not in idle:
                    if not _has_met(made[-1], rank, calls):
                        break
                    clock += 1
                    made[-1] = made[-1]._replace(left_ns=clock)
                    moved = True
                if len(made) == len(program):
                    break
                clock += 1
                made.append(_next_call(program, made, clock)._replace(waited_for=rank not in idle))
                moved = True
    return [RankTrace(rank, tuple(made), rank in ended) for rank, made in enumerate(calls)]


def simulate_queued(programs: Sequence[Program], ended: Sequence[int] = ()) -> list[RankTrace]:
    """As on GPUs: calls are queued, and begin one after the other; a rank waits only for the loss of its step."""
    calls: list[list[Call]] = [[] for _ in programs]
    clock = 0
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            made = calls[rank]
            begun = [[*_left(each), *[call for call in each if call.is_open()][:1]] for each in calls]
            now = len(_left(made))
            if now < len(made) and _has_met(made[now], rank, begun):
                clock += 1
                made[now] = made[now]._replace(left_ns=clock)
                moved = True
            is_synced = all(len(call.group.ranks) < len(programs) for call in made if call.is_open())
            if len(made) < len(program) and is_synced:
                clock += 1
                made.append(_next_call(program, made, clock)._replace(in_order=True, on_device=True))
                moved = True
    return [RankTrace(rank, tuple(made), rank in ended) for rank, made in enumerate(calls)]


def _next_call(program: Program, made: Sequence[Call], entered_ns: int) -> Call:
    """Somebody waits for it."""
    op, group, peer, tag, size = program[len(made)]
    way = (op, peer, tag) if op in ("send", "recv") else ()
    before = [
        each
        for each in made
        if each.group == group and ((each.op, each.peer, each.tag) if each.is_message() else ()) == way
    ]
    what = (len(made) + 1, group, op, len(before) + 1, peer, tag, size, "float32", (size // 4,), 1)
    return Call(*what, entered_ns, 0, True)


def _left(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if not call.is_open()]


def _has_met(call: Call, rank: int, calls: Sequence[Sequence[Call]]) -> bool:
    if call.is_message():
        other = "recv" if call.op == "send" else "send"
        theirs = calls[call.peer]
        ways = [each for each in theirs if (each.op, each.peer, each.tag, each.group) == _end(other, rank, call)]
        return len(ways) >= call.seq
    came = [
        next((each for each in calls[other] if (each.group, each.seq) == (call.group, call.seq)), None)
        for other in call.group.ranks
    ]
    return all(each is not None and (each.op, each.alike()) == (call.op, call.alike()) for each in came)


def _end(op: str, rank: int, call: Call) -> tuple[str, int, int, Group]:
    return op, rank, call.tag, call.group


def planted(layout: Layout, culprit: int, change: Callable[[Program], Program]) -> list[Program]:
    """STEPS healthy ones, one in which the culprit's is changed, and healthy ones again, if they are reached."""
    programs = []
    for rank in range(layout.size):
        step = layout.step(rank)
        programs.append(step * STEPS + (change(step) if rank == culprit else step) + step * 2)
    return programs


SQUARE = Layout(2, 2)
DP, PP, WORLD = SQUARE.datas, SQUARE.pipes, SQUARE.world


def without(place: int) -> Callable[[Program], Program]:
    return lambda step: [*step[:place], *step[place + 1 :]]


def instead(place: int, **changes: Any) -> Callable[[Program], Program]:
    def change(step: Program) -> Program:
        op, group, peer, tag, size = step[place]
        new = (changes.get("op", op), group, changes.get("peer", peer), changes.get("tag", tag))
        return [*step[:place], (*new, changes.get("size", size)), *step[place + 1 :]]

    return change


def stops(programs: list[Program], rank: int, place: int) -> list[Program]:
    """The rank comes to no call from here on."""
    length = len(SQUARE.step(rank)) * STEPS + place
    return [program[:length] if at == rank else program for at, program in enumerate(programs)]


HEALTHY = planted(SQUARE, 0, lambda step: step)
PLANTED: dict[str, tuple[list[Program], CauseKind, tuple[int, ...], Certainty]] = {
    "absent from a collective": (stops(HEALTHY, 3, 2), CauseKind.ABSENT, (3,), Certainty.CERTAIN),
    "absent before it sends": (stops(HEALTHY, 0, 0), CauseKind.ABSENT, (0,), Certainty.CERTAIN),
    "absent before it receives": (stops(HEALTHY, 2, 0), CauseKind.ABSENT, (2,), Certainty.CERTAIN),
    "ended": (stops(HEALTHY, 1, 2), CauseKind.ENDED, (1,), Certainty.CERTAIN),
    "a send left out": (planted(SQUARE, 0, without(0)), CauseKind.MESSAGE, (0,), Certainty.LIKELY),
    "a receive left out": (planted(SQUARE, 2, without(0)), CauseKind.MESSAGE, (2,), Certainty.LIKELY),
    "another tag": (planted(SQUARE, 0, instead(0, tag=7)), CauseKind.MESSAGE, (0,), Certainty.LIKELY),
    "another operation": (
        planted(SQUARE, 3, instead(2, op="broadcast")),
        *(CauseKind.MISMATCH, (3,), Certainty.LIKELY),
    ),
    "another size among many": (
        planted(SQUARE, 1, instead(3, size=8)),
        CauseKind.MISMATCH,
        (1,),
        Certainty.CERTAIN,
    ),
    "another size of two": (
        planted(SQUARE, 1, instead(2, size=8)),
        *(CauseKind.MISMATCH, (1,), Certainty.LIKELY),
    ),
    "another order of groups": (
        planted(SQUARE, 1, lambda step: [*step[:2], step[3], step[2]]),
        *(CauseKind.ORDER, (1,), Certainty.LIKELY),
    ),
    "one call more": (
        planted(SQUARE, 2, lambda step: [*step[:3], step[2], step[3]]),
        *(CauseKind.ORDER, (2,), Certainty.LIKELY),
    ),
    "one call less": (planted(SQUARE, 0, without(2)), CauseKind.ORDER, (0,), Certainty.LIKELY),
}
ENDED = {"ended": (1,)}


@pytest.mark.parametrize("run", [simulate, simulate_queued])
@pytest.mark.parametrize("name", PLANTED)
def test_the_first_stuck_rank_is_named_and_not_its_victims(name: str, run: Callable[..., list[RankTrace]]) -> None:
    programs, kind, ranks, sure = PLANTED[name]
    first = find_causes(run(programs, ENDED.get(name, ())))[0]
    assert (first.kind, first.ranks, first.sure) == (kind, ranks, sure), describe([first])
    assert set(first.victims) == {0, 1, 2, 3} - set(ranks), "each of the others waits for it in the end"


def test_nothing_is_said_of_ranks_that_wait_for_nobody() -> None:
    done = simulate([program[:-1] for program in stops(HEALTHY, 0, 4)])
    assert find_causes(simulate([SQUARE.step(rank) * STEPS for rank in range(4)])) == []
    assert find_causes([]) == []
    assert [each.kind for each in find_causes(done)] != [], "the simulation itself hangs when it should"


def test_what_is_not_queued_has_come_though_an_older_call_of_a_gpu_is_open() -> None:
    """A barrier of gloo beside NCCL, a collective in another stream."""
    what = (WORLD, "all_reduce", 1, -1, 0, 4, "float32", (1,), 1)
    barrier = (Group("cpu", "", 1, (0, 1, 2, 3)), "barrier", 1, -1, 0, 0, "", (), 0)
    older = Call(1, *what, 1, 0, waited_for=True, in_order=True, on_device=True)
    traces = [
        RankTrace(rank, (older, Call(2, *barrier, 2, 0, waited_for=True)) if rank != 3 else (older,))
        for rank in range(4)
    ]
    assert (3,) in [met.missing for met in find_waits({each.rank: each for each in traces}).meetings.values()]
    queued = [
        each._replace(calls=tuple(call._replace(on_device=True, in_order=True) for call in each.calls))
        for each in traces
    ]
    assert [met.missing for met in find_waits({each.rank: each for each in queued}).meetings.values()] == [()]


def test_who_may_be_in_a_call_that_cannot_be_seen_is_not_certain_to_be_absent() -> None:
    traces = simulate(stops(HEALTHY, 3, 2))
    calls = traces[3].calls
    traces[3] = traces[3]._replace(calls=(*calls[:-1], calls[-1]._replace(left_ns=0, lost=True)))
    first = find_causes(traces)[0]
    assert (first.kind, first.ranks, first.sure) == (CauseKind.ABSENT, (3,), Certainty.UNSURE)
    assert "cannot be observed" in first.line


def test_calls_that_only_were_not_seen_to_end_say_nothing() -> None:
    group = WORLD
    calls = [
        Call(1, group, "all_reduce", 1, -1, 0, 4, "float32", (1,), 1, 10 + rank, 0, False) for rank in range(4)
    ]
    assert find_causes(RankTrace(rank, (call,)) for rank, call in enumerate(calls)) == []
    # The same, while one is in the next: then the rest is missed.
    more = Call(2, group, "all_reduce", 2, -1, 0, 4, "float32", (1,), 1, 20, 0, True)
    traces = [RankTrace(rank, (call, more) if rank != 2 else (call,)) for rank, call in enumerate(calls)]
    (cause,) = find_causes(traces)
    assert (cause.kind, cause.ranks) == (CauseKind.ABSENT, (2,))


def test_all_have_come_and_it_does_not_end() -> None:
    def calls(entered_ns: Sequence[int], left: Sequence[int] = ()) -> list[RankTrace]:
        call = Call(1, WORLD, "all_reduce", 1, -1, 0, 4, "float32", (1,), 1, 0, 0, True)
        return [
            RankTrace(rank, (call._replace(entered_ns=at, left_ns=99 if rank in left else 0),))
            for rank, at in enumerate(entered_ns)
        ]

    (late,) = find_causes(calls([1, 2, 3, 5_000_000_000]))
    assert (late.kind, late.ranks, late.sure) == (CauseKind.TRANSFER, (3,), Certainty.UNSURE)
    (none,) = find_causes(calls([1, 2, 3, 4]))
    assert (none.kind, none.ranks) == (CauseKind.TRANSFER, (0, 1, 2, 3))
    (one,) = find_causes(calls([1, 2, 3, 4], left=[0, 1, 3]))
    assert (one.kind, one.ranks) == (CauseKind.TRANSFER, (2,))
    (frozen,) = find_causes([each._replace(stopped=each.rank == 1) for each in calls([1, 2, 3, 4])])
    assert (frozen.kind, frozen.ranks, frozen.sure) == (CauseKind.STOPPED, (1,), Certainty.CERTAIN)


def test_both_ends_of_a_message_have_come() -> None:
    send = Call(1, PP[0], "send", 1, 2, 0, 64, "float32", (16,), 1, 1, 0, True)
    receive = send._replace(op="recv", peer=0)
    (slow,) = find_causes([RankTrace(0, (send,)), RankTrace(2, (receive,))])
    assert (slow.kind, slow.ranks, slow.sure) == (CauseKind.TRANSFER, (0,), Certainty.UNSURE)
    assert "slow sender, rank 0" in slow.line
    (size,) = find_causes([RankTrace(0, (send,)), RankTrace(2, (receive._replace(size_bytes=32),))])
    assert size.kind is CauseKind.MISMATCH
    anybody = receive._replace(op="recv_any_source", peer=-1)
    (absent,) = find_causes([RankTrace(0, ()), RankTrace(2, (anybody,))])
    assert (absent.kind, absent.ranks) == (CauseKind.ABSENT, (0,))


def test_a_rank_without_a_ring_is_said_to_be_unknown() -> None:
    traces = [each for each in simulate(stops(HEALTHY, 3, 2)) if each.rank != 3]
    first = find_causes(traces)[0]
    assert (first.kind, first.ranks, first.sure) == (CauseKind.UNSEEN, (3,), Certainty.LIKELY)


def test_a_rank_that_waits_for_none_of_its_calls_is_the_one() -> None:
    """It started a collective, and does something else now: others wait for it elsewhere."""
    pair = Group("a", "", 1, (0, 1))
    under_way = Call(1, pair, "all_reduce", 1, -1, 0, 4, "float32", (1,), 1, 1, 0, False)
    waits = Call(1, WORLD, "all_reduce", 1, -1, 0, 4, "float32", (1,), 1, 1, 0, True)
    traces = [RankTrace(0, (under_way,)), *(RankTrace(rank, (waits,)) for rank in (1, 2, 3))]
    first = find_causes(traces)[0]
    assert (first.kind, first.ranks, first.sure) == (CauseKind.ABSENT, (0,), Certainty.LIKELY)


def test_the_text_has_the_root_cause_first() -> None:
    causes = find_causes(simulate(PLANTED["absent from a collective"][0]))
    lines = describe(causes)
    assert lines[0].startswith(
        "root cause (certain): rank 3 has not entered all_reduce #7 of group dp (ranks 2-3)"
    )
    assert "  victims: ranks 0-2" in lines
    record = as_record(causes[0])
    assert (record["kind"], record["ranks"], record["victims"]) == ("did-not-enter", [3], [0, 1, 2])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_whichever_rank_stops_in_whatever_layout_is_named(data: st.DataObject) -> None:
    layout = Layout(data.draw(st.integers(1, 4)), data.draw(st.integers(2, 4)))
    culprit = data.draw(st.integers(0, layout.size - 1))
    step = layout.step(culprit)
    place = data.draw(st.integers(0, len(step) - 1))
    programs = planted(layout, culprit, lambda step: step)
    programs[culprit] = programs[culprit][: len(step) * STEPS + place]
    run = data.draw(st.sampled_from([simulate, simulate_queued]))
    (cause,) = find_causes(run(programs))
    assert (cause.kind, cause.ranks, cause.sure) == (CauseKind.ABSENT, (culprit,), Certainty.CERTAIN)
    assert set(cause.victims) == set(range(layout.size)) - {culprit}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_step_is_never_blamed_on_a_healthy_rank(data: st.DataObject) -> None:
    """Left out, doubled or exchanged: the culprit, or all of a circle, but nobody else alone."""
    layout = Layout(data.draw(st.integers(2, 4)), data.draw(st.integers(2, 4)))
    culprit = data.draw(st.integers(0, layout.size - 1))
    step = layout.step(culprit)
    place = data.draw(st.integers(0, len(step) - 1))
    how = data.draw(st.sampled_from(["less", "more", "exchanged"]))
    changed = {
        "less": [*step[:place], *step[place + 1 :]],
        "more": [*step[:place], step[place], *step[place:]],
        "exchanged": [*step[:place], *reversed(step[place : place + 2]), *step[place + 2 :]],
    }[how]
    run = data.draw(st.sampled_from([simulate, simulate_queued]))
    causes = find_causes(run(planted(layout, culprit, lambda _: changed)))
    if causes:
        assert culprit in causes[0].ranks, describe(causes)


calls = st.builds(
    Call,
    serial=st.integers(1, 20),
    group=st.sampled_from([*DP, *PP, WORLD]),
    op=st.sampled_from(["all_reduce", "barrier", "send", "recv", "recv_any_source"]),
    seq=st.integers(1, 4),
    peer=st.integers(-1, 5),
    tag=st.integers(0, 1),
    size_bytes=st.integers(0, 8),
    dtype=st.sampled_from(["float32", "int64"]),
    shape=st.just((1,)),
    tensors=st.just(1),
    entered_ns=st.integers(1, 9),
    left_ns=st.integers(0, 9),
    waited_for=st.booleans(),
    failed=st.booleans(),
    lost=st.booleans(),
)
traces_of_anything = st.lists(
    st.builds(RankTrace, st.integers(0, 5), st.lists(calls, max_size=6).map(tuple), st.booleans(), st.booleans()),
    max_size=6,
    unique_by=lambda trace: trace.rank,
)


@settings(max_examples=200, deadline=None)
@given(traces_of_anything)
def test_whatever_comes_is_judged(traces: list[RankTrace]) -> None:
    """Also what no job can have recorded: no error, and somebody is named wherever somebody waits."""
    waits = find_waits({each.rank: each for each in traces})
    causes = find_causes(traces)
    assert bool(causes) == bool(waits.of_rank)
    for cause in causes:
        assert not set(cause.ranks) & set(cause.victims)
        assert describe([cause])[0].startswith("root cause")
    ends = find_roots(waits)
    assert len({node for end in ends for node in end}) == sum(map(len, ends)), "no node is in two ends"


def test_a_turn_is_what_breaks_a_habit() -> None:
    step = SQUARE.step(0)
    healthy = simulate([SQUARE.step(rank) * STEPS for rank in range(4)])[0].calls
    assert find_order_break(healthy) is None
    assert find_order_break(healthy[: len(step)]) is None, "nothing was a habit yet"
    broken = [*healthy[:-1], healthy[-1]._replace(op="barrier")]
    turn = find_order_break(broken)
    assert turn is not None
    assert turn.op == "barrier"


def test_names_of_ranks() -> None:
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 2, 7]) == "ranks 0-2, 7"
    assert name_ranks(range(0, 100, 2)).endswith(", ...")


def failing(rank: int, sizes: Sequence[int], group: Group, **last: Any) -> RankTrace:
    """A rank whose newest call has failed, or was left open by its end."""
    calls = [
        Call(at, group, "all_reduce", at, -1, 0, size, "float32", (size // 4,), 1, at, at, True)
        for at, size in enumerate(sizes, 1)
    ]
    return RankTrace(rank, (*calls[:-1], calls[-1]._replace(**last)), ended=True)


def test_a_size_that_does_not_fit_is_named_after_the_failure() -> None:
    """Where all others agree, and of two the one that never had it before; not where it did not matter."""
    group = Group("1", "dp", 1, (0, 1, 2))
    sizes = {0: (40, 40), 1: (40, 20), 2: (40, 40)}
    traces = [
        failing(rank, sizes[rank], group, left_ns=0 if rank == 1 else 9, failed=rank != 1) for rank in range(3)
    ]
    (cause,) = find_mismatches(traces)
    assert (cause.kind, cause.ranks, cause.sure, cause.victims) == (
        CauseKind.MISMATCH,
        (1,),
        Certainty.CERTAIN,
        (0, 2),
    )
    (cause,) = find_mismatches(traces[:2])
    assert (cause.ranks, cause.sure) == ((1,), Certainty.LIKELY)
    assert "rank 1 never used that size or type in it before" in cause.why
    both = [failing(rank, (40 if rank else 20,), group, failed=True) for rank in (0, 1)]
    (cause,) = find_mismatches(both)
    assert (cause.ranks, cause.sure) == ((0, 1), Certainty.UNSURE)
    assert find_mismatches([failing(rank, sizes[rank], group) for rank in range(3)]) == [], "it went well"
    assert find_mismatches([failing(rank, (40,), group, failed=True) for rank in range(3)]) == []
