"""Which process is killed when, and what is right afterwards: pure, without a job."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kill_restart_plan import (
    ENDED,
    GOES_ON_STEPS,
    NODES,
    OF_LADDER,
    RANKS,
    STAGES,
    TARGETS,
    UNCLEAR,
    WENT_ON,
    End,
    Kill,
    Step,
    draw,
    find_unclear,
    goes_on_ns,
    judge,
    parse_progress,
)

ENDPOINT = "127.0.0.1:4711"
PID = 812
KILL = Kill(0, "agent1", 1, 0, "elastic", "after", 0.01, 1, 0, 0.0)


# ---- which and when ------------------------------------------------------------------------------------------


@given(st.integers(0, 2**32), st.integers(1, 120))
def test_a_seed_gives_the_same_kills_each_time(seed: int, count: int) -> None:
    kills = draw(seed, count)
    assert kills == draw(seed, count)
    assert [kill.number for kill in kills] == list(range(count))
    for kill in kills:
        assert kill.node in range(NODES) and kill.host in range(NODES) and kill.fail_rank in range(RANKS)
        assert 0.0 <= kill.after_s <= 1.0
        assert kill.has_ladder or kill.stage not in OF_LADDER
        if kill.target == "coordinator":
            assert kill.node == kill.host
        elif kill.target.startswith("agent"):
            assert kill.node != kill.host, "that one is the coordinator"
        if kill.target[-1] in "01":
            assert kill.node == int(kill.target[-1])


@given(st.integers(0, 2**32))
def test_each_target_is_killed_at_each_stage(seed: int) -> None:
    count = len(TARGETS) * len(STAGES)
    assert Counter((kill.target, kill.stage) for kill in draw(seed, count)) == Counter(
        (target, stage) for target in TARGETS for stage in STAGES
    )


def test_only_who_has_to_end_may() -> None:
    assert KILL.must_go_on and KILL._replace(mode="replaced").must_go_on
    assert not KILL._replace(mode="fixed").must_go_on, "a node is missing"
    assert not KILL._replace(target="coordinator", node=0).must_go_on
    assert KILL._replace(target="fork_server", node=0, mode="fixed").must_go_on


# ---- does it go on -------------------------------------------------------------------------------------------


def made(pid: int, began_ns: int, world: int = 2, restart: int = 1, steps: int = GOES_ON_STEPS) -> list[Step]:
    """A rank that begins and makes steps, one a nanosecond."""
    return [Step(began_ns + number, pid, restart, world, number - 1) for number in range(steps + 1)]


def test_it_goes_on_when_all_ranks_of_the_new_world_have_made_steps() -> None:
    ranks = {rank: made(10 + rank, 100 + rank) for rank in range(2)}
    assert goes_on_ns(ranks, 99, KILL) == 101 + GOES_ON_STEPS
    ranks[3] = made(7, 10, world=4)  # was lost before
    assert goes_on_ns(ranks, 99, KILL) == 101 + GOES_ON_STEPS


@pytest.mark.parametrize(
    ("ranks", "why"),
    [
        ({}, "nothing was done"),
        ({0: made(1, 100)}, "rank 1 is not there"),
        ({0: made(1, 100), 1: made(2, 100, steps=GOES_ON_STEPS - 1)}, "too few steps"),
        ({0: made(1, 100), 1: made(2, 100, world=4)}, "of another world"),
        ({0: made(1, 100), 1: made(2, 100, restart=0)}, "of another attempt"),
        ({0: made(1, 95), 1: made(2, 95)}, "these had begun before"),
        ({0: made(1, 100, restart=0), 1: made(2, 100, restart=0)}, "rank 0 will fail"),
    ],
)
def test_it_does_not_go_on(ranks: dict[int, list[Step]], why: str) -> None:
    assert goes_on_ns(ranks, 99, KILL) is None, why


def test_ranks_go_on_without_their_fork_server_process() -> None:
    kill = KILL._replace(target="fork_server")
    ranks = {rank: made(rank, 90, steps=20) for rank in range(2)}
    assert goes_on_ns(ranks, 99, kill) == 99 + GOES_ON_STEPS
    assert goes_on_ns(ranks, 109, kill) is None, "they stand still"


def test_a_line_that_is_being_written_is_left_out() -> None:
    assert parse_progress("5 10 0 4 -1\n6 10 0 4 0\n7 10") == [Step(5, 10, 0, 4, -1), Step(6, 10, 0, 4, 0)]
    assert parse_progress("7 1") == []


# ---- is the end clear ----------------------------------------------------------------------------------------

SUPERVISOR = KILL._replace(target="guard1")
NEITHER = "bootrun: error: ranks failed\n"


@pytest.mark.parametrize(
    ("kill", "node", "line"),
    [
        (KILL, 0, f"only 1 of 2 nodes joined within 6 s (join_timeout): vm; lost: vm (pid {PID}, node rank 1): x"),
        (KILL._replace(target="coordinator", node=0), 1, f"the coordinator at {ENDPOINT} is gone: it closed"),
        (SUPERVISOR, 1, "the supervisor process is gone (killed?); all ranks of this node were ended with it"),
        (
            SUPERVISOR,
            0,
            f"lost node vm (pid {PID}, node rank 1): its supervisor process was killed; the job needs 2 nodes",
        ),
        (
            SUPERVISOR._replace(host=1),
            0,
            "vm, the node of the coordinator, has left the job: its supervisor process was killed",
        ),
    ],
)
def test_an_end_is_clear_if_it_names_what_died_and_where(kill: Kill, node: int, line: str) -> None:
    assert find_unclear(kill, [End(node, 1, f"bootrun: error: {line}\n")], PID, ENDPOINT) == ""
    assert "ranks failed" in find_unclear(kill, [End(node, 1, NEITHER)], PID, ENDPOINT)
    assert "no error" in find_unclear(kill, [End(node, 1, f"bootrun: {line}\n")], PID, ENDPOINT)
    other = KILL if kill.target != "agent1" else SUPERVISOR
    assert find_unclear(other, [End(0, 1, f"bootrun: error: {line}\n")], PID + 1, "127.0.0.1:1")


def test_who_goes_on_without_a_node_says_so_too() -> None:
    lost = f"bootrun: lost node vm (pid {PID}, node rank 1): closed the connection\n"
    assert find_unclear(KILL, [End(0, 0, lost)], PID, ENDPOINT) == ""
    assert "ranks failed" in find_unclear(KILL, [End(0, 0, NEITHER)], PID, ENDPOINT)
    assert find_unclear(KILL, [End(1, 0, "")], PID, ENDPOINT) == "", "this one has come later"
    assert find_unclear(KILL._replace(target="fork_server"), [End(0, 0, "")], PID, ENDPOINT) == ""


def test_the_verdict() -> None:
    ended, well = End(0, 1, ""), End(0, 0, "")
    fixed = KILL._replace(mode="fixed")
    assert judge(KILL, True, [well], "") == (WENT_ON, "")
    assert judge(KILL, True, [ended], "")[0] == UNCLEAR, "the other node failed"
    assert judge(SUPERVISOR, True, [well, End(1, 1, "")], "") == (WENT_ON, "")
    assert judge(SUPERVISOR, True, [well, End(1, 1, "")], "says nothing") == (UNCLEAR, "says nothing")
    assert judge(fixed, False, [ended], "") == (ENDED, "")
    assert judge(KILL, False, [ended], "") == (ENDED, "it could have gone on")
    assert judge(fixed, False, [well], "")[0] == UNCLEAR, "not done, but well"
    assert judge(fixed, False, [], "")[0] == UNCLEAR, "it runs, and does nothing"
    assert judge(fixed, False, [ended], "says nothing") == (UNCLEAR, "says nothing")
