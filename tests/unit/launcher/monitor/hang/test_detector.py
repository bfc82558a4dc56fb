"""Hang detection: single situations, made-up jobs on a virtual clock, and odd input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.hang_healthy import KINDS, Found, hang_once, healthy, watch
from bench.hang_jobs import CADENCES_S, HANGS, LOOK_S, Job, draw_plan, tame
from launcher.base.facts import Hang, HangKind, RankFacts
from launcher.monitor.hang.detector import HangDetector
from launcher.monitor.hang.progress import QUERY_PART, Cadence
from launcher.monitor.hang.settings import HangSettings

FIRST_S = HangSettings().first_s
BUSY_S = HangSettings().busy_s
Change = Callable[[int, float], dict[str, Any]]  # rank, seconds since the last step -> fields that differ


def train(
    detector: HangDetector, until_s: float, step_s: float = 1.0, world: int = 4, from_s: float = 0.0
) -> float:
    """Ranks that use half a core and print a line each step; returns the moment of the last look."""
    now_s = from_s
    while now_s + LOOK_S <= until_s:
        now_s += LOOK_S
        assert detector.look(facts(now_s, now_s, step_s, world), now_s) is None
    return now_s


def facts(
    now_s: float, stepped_s: float, step_s: float, world: int, change: Change | None = None
) -> list[RankFacts]:
    """All ranks at a moment: they stepped and worked until `stepped_s`, since when they differ by `change`."""
    steps = int(stepped_s / step_s)
    seen = []
    for rank in range(world):
        plain = RankFacts(
            rank, now_s, steps, steps * step_s if steps else -1.0, 10 * steps, stepped_s / 2, 0, "S", "futex_wait"
        )
        seen.append(plain._replace(**change(rank, now_s - stepped_s)) if change is not None else plain)
    return seen


def stand(
    detector: HangDetector,
    from_s: float,
    for_s: float,
    change: Change | None = None,
    step_s: float = 1.0,
    world: int = 4,
) -> list[tuple[float, Hang]]:
    """No more steps from there on; what was told, and after how long."""
    told = []
    now_s = from_s
    while now_s + LOOK_S <= from_s + for_s:
        now_s += LOOK_S
        hang = detector.look(facts(now_s, from_s, step_s, world, change), now_s)
        if hang is not None and not hang.is_early:
            told.append((now_s - from_s, hang))
    return told


def busy(from_s: float, ranks: Sequence[int] = range(64)) -> Change:
    """These ranks use a whole core from there on."""
    return lambda rank, past_s: {"cpu_s": from_s / 2 + past_s, "wait": "", "state": "R"} if rank in ranks else {}


def state(letter: str, ranks: Sequence[int], **more: str) -> Change:
    return lambda rank, past_s: {"state": letter, **more} if rank in ranks else {}


def is_quiet(hang: Hang | None) -> bool:
    """What is early is told only where stacks confirm it (test_watch.py)."""
    return hang is None or hang.is_early


def test_all_idle_before_the_first_step_is_a_reason_to_look_closer_once() -> None:
    detector = HangDetector(4)
    found = [detector.look(facts(now_s, 0, 1.0, 4, lambda *_: {"steps": -1}), now_s) for now_s in range(2, 60, 2)]
    [(place, hang)] = [(place, hang) for place, hang in enumerate(found) if hang is not None]
    assert (hang.kind, hang.is_early, hang.since_s) == (HangKind.NOT_STARTED, True, 2.0)
    assert 7 <= 2 * place <= 9 and detector.lasts(hang)
    assert detector.look(facts(60, 0, 1.0, 4, lambda *_: {"steps": -1, "cpu_s": 9.0}), 60) is None
    assert not detector.lasts(hang)


@pytest.mark.parametrize(
    "works", [{"cpu_s": 1.0}, {"io_bytes": 100_000}, {"output_bytes": 20}, {"state": "R"}, {"state": "D"}]
)
def test_one_rank_that_does_something_before_the_first_step_is_enough(works: dict[str, Any]) -> None:
    def change(rank: int, past_s: float) -> dict[str, Any]:
        grown = {name: value * past_s if not isinstance(value, str) else value for name, value in works.items()}
        return {"steps": -1, **(grown if rank == 2 else {})}

    detector = HangDetector(4)
    found = [detector.look(facts(now_s, 0, 1.0, 4, change), now_s) for now_s in range(2, 100, 2)]
    assert [hang.kind for hang in found if hang is not None and hang.is_early] == []


def test_who_is_left_when_others_have_ended_is_named() -> None:
    detector = HangDetector(4)
    train(detector, 60)
    for rank in (0, 1, 3):
        detector.ended(rank)
    found = [(now_s, detector.look(facts(now_s, 60, 1.0, 4)[2:3], now_s)) for now_s in range(62, 400, 2)]
    told = [(hang.kind, hang.ranks, now_s) for now_s, hang in found if hang is not None]
    assert [each[:2] for each in told] == [(HangKind.NOT_ENDED, ()), (HangKind.ALL_IDLE, (2,))]
    assert told[0][2] <= 62 + 15 and 180 <= told[1][2] <= 184


def test_steps_before_the_first_look_are_a_cadence() -> None:
    """A job that stands before it is looked at a second time does not wait out the time of a start."""
    detector = HangDetector(4)
    detector.new_attempt(0.0)
    assert detector.look(facts(1.5, 1.5, 0.05, 4), 1.5) is None
    told = stand(detector, 1.5, 60, step_s=0.05)
    assert [hang.kind for _, hang in told] == [HangKind.ALL_IDLE] and told[0][0] <= 15


def test_what_ranks_do_in_a_hang_is_not_taken_for_usual() -> None:
    """One that spins and one that waits, from before the second look on."""
    detector = HangDetector(2)
    detector.new_attempt(0.0)
    assert detector.look(facts(1.5, 1.0, 0.05, 2), 1.5) is None
    told = []
    for now_s in (1.5 + LOOK_S * look for look in range(1, 30)):
        hang = detector.look(facts(now_s, 1.0, 0.05, 2, busy(1.0, [1])), now_s)
        told += [(hang.kind, hang.ranks)] if hang else []
    assert told == [(HangKind.ONE_APART, (1,))]


def test_all_idle_is_reported_once_at_the_least_limit() -> None:
    detector = HangDetector(4)
    now_s = train(detector, 60)
    [(after_s, hang)] = stand(detector, now_s, 600)
    assert 13 <= after_s <= 15
    assert hang[:5] == (HangKind.ALL_IDLE, now_s, (), QUERY_PART * 15.0, 1.0)
    assert (
        hang.why
        == "no rank has made a step for 14 s; the longest healthy gap was 1.0 s; all wait idle in futex_wait"
    )


def test_the_longest_healthy_gap_sets_the_limit() -> None:
    detector = HangDetector(4)
    now_s = train(detector, 60)
    assert stand(detector, now_s, 12) == []  # a checkpoint
    now_s = train(detector, 120, from_s=now_s + 12)
    [(after_s, hang)] = stand(detector, now_s, 600)
    assert 30 <= after_s <= 36
    assert 12 <= hang.longest_gap_s <= 13


def test_a_rank_apart_is_named() -> None:
    for apart in (busy(60, [2]), busy(60, [0, 1, 3])):
        detector = HangDetector(4)
        train(detector, 60)
        [(after_s, hang)] = stand(detector, 60, 600, apart)
        assert (hang.kind, hang.ranks) == (HangKind.ONE_APART, (2,))
        assert after_s <= 15


@pytest.mark.parametrize(("wait", "blamed"), [("futex_wait_queue", 1), ("hrtimer_nanosleep", 0)])
def test_of_two_ranks_the_one_that_waits_for_the_other_is_not_to_blame(wait: str, blamed: int) -> None:
    detector = HangDetector(2)
    train(detector, 60, world=2)

    def change(rank: int, past_s: float) -> dict[str, Any]:
        return {"cpu_s": 30 + past_s, "wait": ""} if rank == 1 else {"wait": wait}

    [(_, hang)] = stand(detector, 60, 600, change, world=2)
    assert (hang.kind, hang.ranks) == (HangKind.ONE_APART, (blamed,))


def test_where_all_are_idle_the_one_that_waits_elsewhere_is_named() -> None:
    detector = HangDetector(8)
    train(detector, 60, world=8)
    [(_, hang)] = stand(detector, 60, 600, state("S", [5], wait="hrtimer_nanosleep"), world=8)
    assert (hang.kind, hang.ranks) == (HangKind.ALL_IDLE, (5,))


def test_all_busy_is_a_question_at_the_usual_limit_where_it_may_be_one() -> None:
    detector = HangDetector(4, HangSettings(asks_busy=True))
    train(detector, 60)
    found = stand(detector, 60, 2 * BUSY_S, busy(60))
    assert [hang.kind for _, hang in found] == [HangKind.ALL_SPIN, HangKind.ALL_BUSY]
    (asked_s, hang), (reported_s, _) = found
    assert asked_s <= 15.0 and hang.ranks == () and detector.lasts(hang)
    assert BUSY_S <= reported_s <= BUSY_S + 2 * LOOK_S
    train(detector, 10)
    assert not detector.lasts(hang)


def test_a_question_about_all_that_are_busy_hides_no_other_finding() -> None:
    detector = HangDetector(4, HangSettings(asks_busy=True))
    train(detector, 60)

    def then_idle(rank: int, past_s: float) -> dict[str, Any]:
        return busy(60)(rank, min(past_s, 20.0))

    plain = HangDetector(4)
    train(plain, 60)
    found = stand(detector, 60, 300, then_idle)
    assert [hang.kind for _, hang in found][:1] == [HangKind.ALL_SPIN]
    assert found[1:] == stand(plain, 60, 300, then_idle), "told when, and as, it is told without"


def test_all_busy_is_reported_late_and_work_that_shows_still_later() -> None:
    detector = HangDetector(4)
    train(detector, 60)
    [(after_s, hang)] = stand(detector, 60, 2 * BUSY_S, busy(60))
    assert hang.kind is HangKind.ALL_BUSY
    assert BUSY_S <= after_s <= BUSY_S + 2 * LOOK_S
    detector = HangDetector(4)
    train(detector, 60)

    def saving(rank: int, past_s: float) -> dict[str, Any]:
        return {"io_bytes": int(1e6 * past_s)} if rank == 0 else {}

    assert stand(detector, 60, 2 * BUSY_S, saving) == []


def test_a_rank_that_was_always_idle_is_not_apart() -> None:
    def server(rank: int, past_s: float) -> dict[str, Any]:
        return {"cpu_s": 0.0} if rank == 0 else {"cpu_s": 200 + past_s}

    detector = HangDetector(4)
    for now_s in range(2, 400, 2):
        seen = facts(now_s, now_s, 1.0, 4, lambda rank, _: {"cpu_s": 0.0 if rank == 0 else now_s / 2})  # noqa: B023
        assert detector.look(seen, now_s) is None
    assert stand(detector, 398, BUSY_S - 10, server) == []


def test_a_thread_that_prints_is_no_progress_where_steps_are_counted() -> None:
    def bar(rank: int, past_s: float) -> dict[str, Any]:
        printed = int(600 + 50 * past_s)
        return {"output_bytes": printed, "io_bytes": printed, "cpu_s": 30 + 0.02 * past_s}

    detector = HangDetector(4)
    train(detector, 60)
    [(after_s, hang)] = stand(detector, 60, 600, bar)
    assert hang.kind is HangKind.ALL_IDLE
    assert after_s <= 15


def test_stopped_ranks_are_reported_of_at_once_even_if_nothing_was_learned() -> None:
    detector = HangDetector(4)
    told = stand(detector, 0, 600, state("T", [1]))
    assert [(hang.kind, hang.ranks) for _, hang in told] == [(HangKind.FROZEN, (1,))]
    assert told[0][0] <= 5 + 2 * LOOK_S
    told = stand(detector, 600, 60, state("T", [1, 3]))
    assert [hang.ranks for _, hang in told] == [(1, 3)]


def test_a_rank_that_steps_is_not_stopped_however_often_it_is_seen_so() -> None:
    detector = HangDetector(4)
    for now_s in range(2, 100, 2):
        assert detector.look(facts(now_s, now_s, 1.0, 4, state("t", [0, 1])), now_s) is None


def test_a_rank_stuck_in_the_kernel_is_reported_at_the_limit() -> None:
    detector = HangDetector(4)
    train(detector, 60)
    [(after_s, hang)] = stand(detector, 60, 600, state("D", [3], wait="rpc_wait_bit_killable"))
    assert (hang.kind, hang.ranks) == (HangKind.STUCK_IN_KERNEL, (3,))
    assert after_s <= 15
    assert "rpc_wait_bit_killable" in hang.why

    def reading(rank: int, past_s: float) -> dict[str, Any]:
        return {"state": "D", "io_bytes": int(1e6 * past_s)}

    detector = HangDetector(4)
    train(detector, 60)
    assert stand(detector, 60, 600, reading) == []


def test_the_stopped_time_is_no_healthy_gap() -> None:
    detector = HangDetector(4)
    train(detector, 60)
    assert len(stand(detector, 60, 100, state("T", [1]))) == 1
    train(detector, 260, from_s=160)
    [(after_s, _)] = stand(detector, 260, 600)
    assert after_s <= 15


def test_nothing_is_said_where_nothing_was_learned() -> None:
    detector = HangDetector(4)
    assert stand(detector, 0, 20000, lambda rank, past_s: {"steps": -1}) == []
    assert detector.limit_s() is None


def test_before_the_first_steps_much_is_allowed() -> None:
    detector = HangDetector(4)
    [(after_s, hang)] = stand(detector, 0, 2 * FIRST_S)  # an optimizer was made: 0 steps
    assert FIRST_S <= after_s <= FIRST_S + 2 * LOOK_S
    assert "there was none before" in hang.why


def test_output_is_progress_where_nothing_is_counted() -> None:
    def printing(rank: int, past_s: float) -> dict[str, Any]:
        return {"steps": -1}

    detector = HangDetector(4)
    for now_s in range(2, 100, 2):
        assert detector.look(facts(now_s, now_s, 1.0, 4, printing), now_s) is None
    [(after_s, hang)] = stand(detector, 98, 600, printing)
    assert hang.kind is HangKind.ALL_IDLE
    assert hang.why.startswith("no rank has printed anything for")
    assert after_s <= 15 + LOOK_S


def test_output_of_a_server_is_no_cadence() -> None:
    detector = HangDetector(1)
    for now_s in range(2, 2000, 2):
        requests = now_s // 40
        seen = RankFacts(0, now_s, -1, -1.0, 100 * requests, 0.1 * requests, 0, "S", "ep_poll")
        assert is_quiet(detector.look([seen], now_s))
    for now_s in range(2000, 20000, 2):
        assert is_quiet(detector.look([seen._replace(at_s=now_s)], now_s))


def test_a_new_attempt_keeps_what_was_learned_and_waits_for_its_first_step() -> None:
    detector = HangDetector(4)
    train(detector, 60)
    assert len(stand(detector, 60, 60)) == 1
    detector.new_attempt(120)

    def from_again(now_s: float, stepped_s: float) -> list[RankFacts]:
        return [
            each._replace(at_s=now_s, step_at_s=stepped_s if each.steps > 0 else -1.0)
            for each in facts(now_s - 720, stepped_s - 720, 1.0, 4)
        ]

    for now_s in range(122, 720, 2):
        seen = [each._replace(steps=-1) for each in facts(now_s, 0, 1.0, 4)]
        hang = detector.look(seen, now_s)
        assert hang is None or hang.is_early
    assert detector.limit_s() == FIRST_S
    for now_s in range(722, 740, 2):
        assert detector.look(from_again(now_s, now_s), now_s) is None
    assert detector.limit_s() == QUERY_PART * 15.0
    told = [detector.look(from_again(now_s, 738), now_s) for now_s in range(740, 780, 2)]
    assert [hang.kind for hang in told if hang is not None] == [HangKind.ALL_IDLE]


def test_late_facts_are_waited_for_but_not_for_ever() -> None:
    def late(rank: int, past_s: float) -> dict[str, Any]:
        return {"at_s": 60 + max(past_s - 10, 0.0)} if rank == 3 else {}

    detector = HangDetector(4)
    train(detector, 60)
    [(after_s, hang)] = stand(detector, 60, 600, late)
    assert 25 <= after_s <= 26 + 2 * LOOK_S
    assert "not seen lately: 1 of the ranks" in hang.why


def test_time_in_which_nobody_looked_does_not_count() -> None:
    detector = HangDetector(4)
    now_s = train(detector, 60) + 300
    assert detector.look(facts(now_s, 60, 1.0, 4), now_s) is None
    assert detector.look(facts(now_s + 2, 60, 1.0, 4), now_s + 2) is None
    [(after_s, _)] = stand(
        detector, now_s + 2, 60, lambda rank, past_s: {"steps": 60, "step_at_s": 60.0, "cpu_s": 30.0}
    )
    assert after_s <= 15


def test_a_clock_that_is_set_back_or_is_not_mapped_yet() -> None:
    detector = HangDetector(4)
    train(detector, 1000, from_s=600)
    # All clocks fall by 500 s; steps go on.
    for now_s in range(502, 600, 2):
        seen = [
            each._replace(at_s=float(now_s), step_at_s=float(now_s))
            for each in facts(now_s + 500, now_s + 500, 1.0, 4)
        ]
        assert detector.look(seen, now_s) is None
    told = []
    for now_s in range(600, 640, 2):
        seen = [each._replace(at_s=float(now_s)) for each in facts(1098, 1098, 1.0, 4)]
        ahead = seen[0]._replace(at_s=1e6, steps=10**6)  # a rank's clock that is far ahead proves nothing
        told.append(detector.look([ahead, *seen[1:]], now_s))
    assert [hang.kind for hang in told if hang is not None] == [HangKind.ALL_IDLE]


def test_lines_of_a_second_start_are_no_cadence() -> None:
    def printing(rank: int, past_s: float) -> dict[str, Any]:
        return {"steps": -1}

    detector = HangDetector(4)
    for now_s in range(2, 100, 2):
        assert detector.look(facts(now_s, now_s, 1.0, 4, printing), now_s) is None
    detector.new_attempt(100.0)
    for now_s in range(102, 110, 2):
        assert detector.look(facts(now_s, now_s - 100, 1.0, 4, printing), now_s) is None
    assert detector.limit_s() == FIRST_S


def test_once_ranks_have_ended_the_rest_may_clean_up() -> None:
    detector = HangDetector(4)
    train(detector, 60)
    detector.ended(0)
    [(after_s, hang)] = stand(detector, 60, 600)
    assert (hang.limit_s, 120 <= after_s <= 126) == (120.0, True)


def test_a_finding_that_changes_is_reported_again() -> None:
    def change(rank: int, past_s: float) -> dict[str, Any]:
        return {"cpu_s": 30 + max(0.0, past_s - 30)} if rank == 1 else {}

    detector = HangDetector(4)
    train(detector, 60)
    told = stand(detector, 60, 600, change)
    assert [(hang.kind, hang.ranks) for _, hang in told] == [(HangKind.ALL_IDLE, ()), (HangKind.ONE_APART, (1,))]


def test_a_cadence() -> None:
    cadence = Cadence(100.0)
    assert cadence.note(10.0, 10.0, 3)
    assert not cadence.note(9.0, 9.5)
    assert cadence.note(20.0, 25.0)
    assert cadence.note(90.0, 95.0, excused=True)
    assert (cadence.gaps, cadence.longest_s) == (4, 10.0)
    cadence.begin_attempt()
    assert cadence.note(900.0, 900.0)
    assert cadence.note(2000.0, 2000.0)
    assert (cadence.gaps, cadence.attempt_gaps, cadence.longest_s) == (5, 1, 100.0)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CADENCES_S),
    st.sampled_from([kind for kind in HANGS if kind != "all-busy"]),
    st.integers(0, 10**6),
)
def test_a_hang_is_found_in_time(step_s: float, kind: str, seed: int) -> None:
    found = hang_once(seed, step_s, kind, Random(seed).choice((2, 3, 4, 8)), max_after_s=300.0, tamed=True)
    assert found == Found(found.delay_s, True, found.right_kind, found.right_rank, False)


def test_kinds_and_ranks_are_mostly_right() -> None:
    for kind in KINDS:
        found = [hang_once(seed, 2.0, kind, 4, max_after_s=200.0, tamed=True) for seed in range(6)]
        assert sum(each.right_kind for each in found) >= 5, kind
        assert sum(each.right_rank for each in found) >= 5, kind


# The same jobs each time: of thousands a few are taken for hanging, which `bench hang_healthy` counts.
@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.sampled_from(CADENCES_S), st.integers(0, 10**6))
def test_nothing_is_reported_of_healthy_jobs(step_s: float, seed: int) -> None:
    random = Random(seed)
    plan = tame(draw_plan(random, step_s, random.choice((2, 4, 8))))
    assert watch(HangDetector(plan.world), Job(plan, random), 0.0, 2400.0) == []


@pytest.mark.parametrize("trap", ["a silent server", "a server that prints"])
def test_nothing_is_reported_of_servers(trap: str) -> None:
    assert healthy(1, 2.0, 3.0, trap)[0] == []


numbers = st.one_of(st.floats(), st.sampled_from([0.0, -1.0, 5.0, 1e308, -1e308]), st.floats(0, 100))
counts = st.integers(-2, 10**6)
odd_facts = st.builds(
    RankFacts,
    st.integers(-2, 5),
    numbers,
    counts,
    numbers,
    counts,
    numbers,
    counts,
    st.sampled_from(["R", "S", "D", "T", "Z", "", "?"]),
    st.sampled_from(["", "futex", "0"]),
)
calls = st.one_of(
    st.tuples(st.just("look"), st.lists(odd_facts, max_size=6), numbers),
    st.tuples(st.just("new_attempt"), numbers),
    st.tuples(st.just("ended"), st.integers(-2, 5)),
)


@settings(max_examples=200)
@given(st.integers(0, 4), st.lists(calls, max_size=30))
def test_odd_input_never_raises(world: int, made: list[tuple[Any, ...]]) -> None:
    few = HangSettings(1.0, 1.0, 2.0, 3.0, 4.0)
    detector = HangDetector(world, few)
    for name, *arguments in made:
        hang = getattr(detector, name)(*arguments)
        if isinstance(hang, Hang):
            assert all(0 <= rank < world for rank in hang.ranks)
            assert hang.why


@given(st.lists(st.tuples(st.lists(odd_facts, max_size=6), st.floats(0, 4)), max_size=30))
def test_odd_facts_at_steady_looks_never_raise(looks: list[tuple[list[RankFacts], float]]) -> None:
    detector = HangDetector(4, HangSettings(1.0, 1.0, 2.0, 3.0, 4.0, steps_needed=1, outputs_needed=1))
    now_s = 0.0
    for seen, past_s in looks:
        now_s += past_s
        detector.look(seen, now_s)
        detector.look([each._replace(at_s=now_s) for each in seen], now_s)
