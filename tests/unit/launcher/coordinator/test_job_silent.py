"""Nodes of which nothing is heard, at the job's brain: who is waited for, how long, and what comes of it."""

from __future__ import annotations

import pytest

from launcher.coordinator.nodes import Silence
from launcher.coordinator.silence import CUT_S
from launcher.rendezvous.messages import DroppedFromJob, Note, Signalled, Stop
from tests.unit.launcher.jobsim import Sim, make_rules

LIMIT_S = 15.0


def start(low: int, high: int, **changes: object) -> Sim:
    sim = Sim(make_rules(min_nodes=low, max_nodes=high, **changes))
    for node in range(1, high + 1):
        sim.join(node)
    assert sim.ranks() == {node: node - 1 for node in range(1, high + 1)}
    sim.now_s = 100.0
    return sim


def is_given_up(sim: Sim, node: int) -> bool:
    return any(isinstance(message, DroppedFromJob) for message in sim.inbox[node])


def attempts(sim: Sim, node: int = 1) -> list[int]:
    return [world.attempt for world in sim.worlds(node)]


@pytest.mark.parametrize(
    ("nodes", "how", "waited_s"),
    [
        ((2, 2), Silence.CUT, CUT_S),
        ((2, 2), Silence.MUTE, 3 * LIMIT_S),
        ((2, 2), Silence.STALLED, 600.0),
        ((1, 2), Silence.CUT, 0.0),
        ((1, 2), Silence.MUTE, 0.0),
        ((1, 2), Silence.STALLED, 3 * LIMIT_S),
        ((3, 3), Silence.MUTE, 3 * LIMIT_S),
        ((2, 3), Silence.MUTE, 0.0),
        ((2, 3), Silence.STALLED, 3 * LIMIT_S),
    ],
)
@pytest.mark.parametrize("restarts", [0, 1])
def test_how_long_a_node_is_waited_for(
    nodes: tuple[int, int], how: Silence, waited_s: float, restarts: int
) -> None:
    low, high = nodes
    sim = start(low, high, max_restarts=restarts, join_s=600.0)
    sim.unheard(2, how)
    if waited_s:
        sim.advance(waited_s - 0.1)
        assert not is_given_up(sim, 2) and attempts(sim) == [0]
        sim.advance(0.2)
    assert is_given_up(sim, 2)
    if low < high:
        assert attempts(sim) == [0, 1] and sim.world(1).restart_count == 0
    elif not restarts:
        finish = sim.finish(1)
        assert finish is not None
        assert finish.status == 1 and "and --max-restarts is 0" in finish.reason
    else:
        sim.join(9, "node2")
        assert attempts(sim) == [0, 1] and sim.world(1).restart_count == 1


@pytest.mark.parametrize("how", list(Silence))
def test_who_is_received_of_again_goes_on_as_if_nothing_had_been(how: Silence) -> None:
    sim = start(2, 2)
    sim.unheard(2, how)
    sim.advance(1.0)
    sim.hear(2)
    sim.advance(1000.0)
    assert attempts(sim) == [0] and not is_given_up(sim, 2)
    sim.succeed(1, 2)
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 0


def test_it_is_reported_once_and_says_what_is_done() -> None:
    sim = start(2, 2)
    for _ in range(3):
        sim.unheard(2, Silence.MUTE)
        sim.advance(1.0)
    sim.hear(2)
    told = [message.text for message in sim.inbox[1] if isinstance(message, Note)]
    who = "node2 (pid 102, node rank 1)"
    silent = f"no message from {who}: it was silent for 15 s; the job continues"
    assert told == [
        f"warning: {silent}, waiting for it up to 45 s more",
        f"{who} is reachable again, after 16.0 s",
    ]


def test_what_it_did_meanwhile_counts() -> None:
    sim = start(2, 2)
    sim.succeed(1)
    sim.unheard(2, Silence.STALLED)
    sim.advance(5.0)
    sim.hear(2)
    sim.succeed(2)
    finish = sim.finish(2)
    assert finish is not None
    assert finish.status == 0


def test_a_rank_of_another_node_fails_meanwhile_and_the_node_is_back_in_time() -> None:
    """It answers the order to stop then; what had failed there first is the cause."""
    sim = start(2, 2, max_restarts=2)
    sim.unheard(2, Silence.STALLED)
    sim.fail(1)
    sim.advance(5.0)
    assert attempts(sim) == [0]
    sim.hear(2)
    assert attempts(sim) == attempts(sim, 2) == [0, 1]
    assert sim.world(1).restart_count == 1


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_rank_of_another_node_fails_meanwhile_and_the_node_is_not_back(restarts: int) -> None:
    sim = start(2, 2, max_restarts=restarts, grace_s=10.0)
    sim.unheard(2, Silence.MUTE)
    sim.fail(1)
    if restarts:
        assert not is_given_up(sim, 2)
        sim.advance(30.0)
    assert is_given_up(sim, 2) and bool(sim.finish(1)) is not bool(restarts)
    if restarts:
        sim.join(3, "node2")
        assert attempts(sim) == [0, 1]


def test_an_elastic_job_does_not_wait_for_it_once_an_attempt_ends() -> None:
    sim = start(1, 2, max_restarts=1)
    sim.unheard(2, Silence.STALLED)
    sim.fail(1)
    assert is_given_up(sim, 2) and attempts(sim) == [0, 1]


def test_a_signal_does_not_wait_for_it() -> None:
    sim = start(2, 2, max_restarts=3)
    sim.unheard(2, Silence.STALLED)
    sim.say(1, Signalled(15))
    finish = sim.finish(1)
    assert finish is not None
    assert finish.status == 143 and is_given_up(sim, 2)


def test_who_comes_meanwhile_steps_in_for_it() -> None:
    sim = start(2, 2, max_restarts=1)
    sim.unheard(2, Silence.MUTE)
    sim.advance(3.0)
    sim.join(3, "other")
    assert is_given_up(sim, 2)
    assert sim.ranks() == {1: 0, 3: 1}


def test_the_same_node_started_again_steps_in_for_itself_in_a_static_job() -> None:
    sim = Sim(make_rules(min_nodes=2, max_nodes=2, static=True, max_restarts=1))
    sim.join(1, node_rank=0)
    sim.join(2, node_rank=1)
    sim.now_s = 100.0
    sim.unheard(2, Silence.CUT)
    sim.join(3, "node2", node_rank=1)
    assert sim.refusal(3) is None
    assert sim.ranks() == {1: 0, 3: 1}


def test_two_of_three_are_silent_and_one_comes_back() -> None:
    sim = start(3, 3, max_restarts=1)
    sim.unheard(2, Silence.MUTE)
    sim.unheard(3, Silence.MUTE)
    sim.advance(10.0)
    sim.hear(3)
    sim.advance(40.0)
    assert is_given_up(sim, 2) and not is_given_up(sim, 3)
    assert [message.attempt for message in sim.inbox[3] if isinstance(message, Stop)] == [0]
    sim.join(4, "node2")
    assert sim.ranks() == {1: 0, 3: 2, 4: 1}


def test_a_spare_is_not_waited_for() -> None:
    sim = start(2, 2)
    sim.join(3)
    sim.unheard(3, Silence.STALLED)
    assert is_given_up(sim, 3) and attempts(sim) == [0]


def test_before_the_first_attempt_a_silent_node_is_no_node_yet() -> None:
    sim = Sim(make_rules(min_nodes=2, max_nodes=2))
    sim.join(1)
    sim.unheard(1, Silence.STALLED)
    sim.join(2)
    assert sim.ranks() == {}
    sim.hear(1)
    assert sim.ranks() == {1: 0, 2: 1}


def test_late_joiners_wait_until_it_is_known_what_becomes_of_a_silent_node() -> None:
    sim = start(1, 2)
    sim.lose(2)
    assert attempts(sim) == [0, 1]
    sim.join(3)
    sim.advance(2.0)
    assert sim.ranks() == {1: 0, 3: 1}
    sim = Sim(make_rules(min_nodes=1, max_nodes=3))
    sim.join(1)
    sim.join(2)
    sim.advance(30.0)
    sim.unheard(2, Silence.STALLED)
    sim.join(3)
    sim.advance(5.0)
    assert attempts(sim) == [0]
    sim.hear(2)
    sim.advance(2.0)
    assert sim.ranks() == {1: 0, 2: 1, 3: 2}
