"""Slow ranks: when it is looked into, who is named by rounds of stacks, and what is not taken for it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.base.facts import RankFacts
from launcher.monitor.hang.waiting import is_in_collective
from launcher.monitor.samples.stacks import Frame, RankStacks, Source
from launcher.monitor.slow import AGAIN_S, LASTS_S, ROUNDS, SlowDetector, SlowSteps, StackRounds, round_s

PEERS = Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 5, "all_reduce")


def facts(now_s: float, takes_s: float, min_s: float = 0.0, world: int = 4, steps: int = 100) -> list[RankFacts]:
    plain = RankFacts(0, now_s, steps, now_s, 0, 1.0, 0, "S", "")
    return [plain._replace(rank=rank, step_takes_s=takes_s, step_least_s=min_s) for rank in range(world)]


def run(
    detector: SlowDetector, from_s: float, for_s: float, takes_s: float, min_s: float = 0.0
) -> list[tuple[float, SlowSteps]]:
    found = []
    for half in range(int(for_s / 2)):
        now_s = from_s + 2 * half
        slow = detector.look(facts(now_s, takes_s, min_s), now_s)
        if slow is not None:
            found.append((now_s, slow))
    return found


def test_steps_that_take_longer_than_before_are_looked_into() -> None:
    detector = SlowDetector()
    assert run(detector, 0, 60, 0.05) == []
    found = run(detector, 60, 20, 0.2)
    assert found[0] == (60 + LASTS_S, SlowSteps(60, 0.2, 0.05))
    detector.judged(True, 75)
    assert run(detector, 80, 400, 0.2) == [], "it is told once"
    assert run(detector, 480, 20, 0.05) == []
    assert run(detector, 500, 20, 0.2) != [], "it had ended, and comes again"


def test_soon_after_the_start_the_least_that_steps_took_is_usual() -> None:
    found = run(SlowDetector(), 0, 20, 0.2, min_s=0.05)
    assert found[0][1] == SlowSteps(0, 0.2, 0.05)
    assert run(SlowDetector(), 0, 20, 0.2) == [], "nothing is known"
    few = SlowDetector()
    assert all(few.look(facts(now_s, 0.2, 0.05, steps=3), now_s) is None for now_s in range(0, 60, 2))


def test_where_nobody_stood_out_it_is_looked_into_ever_more_rarely() -> None:
    detector = SlowDetector()
    run(detector, 0, 60, 0.05)
    asked = []
    for now_s in range(60, 4000, 2):
        if detector.look(facts(now_s, 0.5), now_s) is not None:
            asked.append(now_s)
            detector.judged(False, now_s)
    assert 3 <= len(asked) <= 8 and asked[1] - asked[0] >= AGAIN_S


def test_an_evaluation_now_and_then_or_a_little_more_is_not_slow() -> None:
    detector = SlowDetector()
    run(detector, 0, 60, 0.05)
    assert run(detector, 60, 600, 0.08) == []
    assert run(detector, 660, 6, 0.5) == [], "for a moment"
    assert run(detector, 666, 60, 0.05) == []


def stacks(places: dict[int, tuple[Frame, ...]]) -> dict[int, RankStacks]:
    return {rank: RankStacks(rank, 9, Source.HANDLER, main=main, state="S") for rank, main in places.items()}


def user(function: str) -> tuple[Frame, ...]:
    return (Frame("/job/train.py", 7, function), Frame("/job/train.py", 90, "main"))


@pytest.mark.parametrize("slow", [(2,), (0, 1), (3,)])
def test_who_is_hardly_ever_with_the_others_is_named(slow: tuple[int, ...]) -> None:
    random = Random(f"{slow}")
    rounds = StackRounds()
    for number in range(ROUNDS):
        waits = number % 4 != 0  # three quarters of a step
        rounds.take(
            stacks(
                {
                    rank: (PEERS, *user("exchange")) if waits and rank not in slow else user("compute")
                    for rank in random.sample(range(4), 4)
                }
            )
        )
    assert rounds.find_slow(4) == slow


def test_where_calls_are_not_seen_who_is_apart_in_most_rounds_is_named() -> None:
    """All-reduces of DDP run in threads of C++: most ranks are in backward, the slow one elsewhere."""
    rounds = StackRounds()
    for number in range(ROUNDS):
        rest = user("backward" if number % 4 else "forward")
        rounds.take(stacks({rank: rest if rank != 5 else user(f"load{number % 2}") for rank in range(8)}))
    assert rounds.find_slow(8) == (5,)


@given(st.integers(0, 10**6), st.integers(2, 9), st.floats(0.0, 1.0))
def test_alike_ranks_are_not_reported_apart(seed: int, world: int, share: float) -> None:
    """All ranks wait in the same rounds."""
    random, rounds = Random(seed), StackRounds()
    for _ in range(ROUNDS):
        here = (PEERS, *user("exchange")) if random.random() < share else user("compute")
        rounds.take(stacks(dict.fromkeys(range(world), here)))
    assert rounds.find_slow(world) == ()


def test_too_few_rounds_tell_nothing() -> None:
    rounds = StackRounds()
    for _ in range(ROUNDS // 2):
        rounds.take(stacks({0: (PEERS,), 1: (PEERS,), 2: user("compute")}))
    assert rounds.find_slow(3) == ()


def test_wrappers_of_torch_below_what_a_rank_computes_are_no_collective() -> None:
    fsdp = Frame("/x/site-packages/torch/distributed/fsdp/fully_sharded_data_parallel.py", 5, "forward")
    assert not is_in_collective(RankStacks(0, 9, Source.HANDLER, main=(*user("attention"), fsdp, *user("main"))))
    call = Frame("/x/site-packages/torch/nn/functional.py", 5, "linear")
    assert not is_in_collective(RankStacks(0, 9, Source.HANDLER, main=(call, fsdp, *user("main"))))
    assert is_in_collective(RankStacks(0, 9, Source.HANDLER, main=(PEERS, fsdp, *user("main"))))
    ours = Frame("/x/launcher/in_rank/tracer.py", 5, "wait")
    assert is_in_collective(RankStacks(0, 9, Source.HANDLER, main=(ours, PEERS, *user("main"))))


def test_another_unit_of_steps_is_no_slowness() -> None:
    """Heartbeats every hundred steps take the place of optimizers' steps."""
    detector = SlowDetector()
    assert run(detector, 0, 60, 0.05, min_s=0.05) == []
    assert run(detector, 60, 600, 5.0, min_s=5.0) == []
    detector.new_attempt()
    assert run(detector, 700, 100, 50.0, min_s=50.0) == [], "nor are other ranks"


def test_a_queue_that_fills_is_looked_into_once() -> None:
    detector = SlowDetector()
    found = run(detector, 0, 10, 0.3, min_s=0.004)
    assert len(found) == 1
    detector.judged(False, 10)
    assert run(detector, 10, 3000, 0.3, min_s=0.004) == []


def test_ranks_that_do_not_answer_leave_it_open() -> None:
    rounds = StackRounds()
    for _ in range(ROUNDS):
        rounds.take(stacks({0: (PEERS,), 1: (PEERS,), 2: (PEERS,)}))
    assert rounds.find_slow(4) == ()


@given(st.floats(1e-4, 1e4))
def test_rounds_lie_over_about_a_step(takes_s: float) -> None:
    whole_s = sum(round_s(number, takes_s) for number in range(ROUNDS))
    assert 0.7 * min(max(takes_s, 3.2), 32.0) <= whole_s <= 1.3 * min(max(takes_s, 3.2), 32.0)
