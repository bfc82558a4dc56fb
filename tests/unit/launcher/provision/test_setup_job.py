"""What the Job makes of news about the environments of its nodes."""

from __future__ import annotations

import pytest

from launcher.monitor.failure.record import unpack
from launcher.rendezvous.messages import (
    FailureRecordMessage,
    Finish,
    Identity,
    MountFault,
    SetupOrder,
    SetupReport,
    Started,
    WantEnvironment,
    World,
)
from tests.unit.launcher.jobsim import Sim, make_rules

RULES = make_rules(min_nodes=2, max_nodes=2, join_s=100.0, setup_s=1000.0, setup_wait_s=50.0)


def looked(key: str = "k", tree: str = "") -> SetupReport:
    return SetupReport("looked", key, tree, "")


def orders(sim: Sim, node: int) -> list[str]:
    return [each.do for each in sim.inbox.get(node, []) if isinstance(each, SetupOrder)]


def two(sim: Sim) -> None:
    for node in range(2):
        sim.join(node, has_identity=True)


def test_ranks_start_when_all_environments_are_there_and_the_same() -> None:
    sim = Sim(RULES)
    two(sim)
    for node in range(2):
        sim.say(node, looked(tree="t"))
    for node in range(2):
        assert orders(sim, node) == ["use"]
        sim.say(node, SetupReport("fetched", "k", "t", ""))
    assert orders(sim, 0) == orders(sim, 1) == ["use", "show"]
    assert not any(isinstance(each, World) for each in sim.inbox[0])
    for node in range(2):
        sim.say(node, Identity("same", ""))
    assert isinstance(sim.inbox[0][-1], World)


@pytest.mark.parametrize(
    ("what", "why", "said"),
    [
        ("failed", "set-up command 1 of 1 (false) ended with status 1", "set-up failed on node1"),
        ("strict", "compile caches are not used: x", "--strict: an optimization failed on node1"),
    ],
)
def test_what_fails_on_one_node_ends_the_job(what: str, why: str, said: str) -> None:
    sim = Sim(RULES)
    two(sim)
    sim.say(1, SetupReport(what, "", "", why))
    for node in range(2):
        (finish,) = [each for each in sim.inbox[node] if isinstance(each, Finish)]
        assert finish.status == 1
        assert finish.reason == f"{said}: {why}"


def test_environments_that_differ_are_made_once_more_and_then_the_table_is_shown() -> None:
    sim = Sim(RULES)
    two(sim)
    sim.say(0, looked())
    sim.say(1, looked("other"))
    sim.say(0, Identity("one", ""))
    sim.say(1, Identity("two", ""))
    assert orders(sim, 0)[-1] == orders(sim, 1)[-1] == "again"
    assert not any(isinstance(each, WantEnvironment) for each in sim.inbox[0])
    sim.say(0, Identity("one", ""))
    assert not any(isinstance(each, World | WantEnvironment) for each in sim.inbox[0])
    sim.say(1, Identity("two", ""))
    assert any(isinstance(each, WantEnvironment) for each in sim.inbox[0])


def test_environments_that_are_the_same_at_the_second_time() -> None:
    sim = Sim(RULES)
    two(sim)
    sim.say(0, looked())
    sim.say(1, looked("other"))
    for first, second in (("one", "two"), ("same", "same")):
        sim.say(0, Identity(first, ""))
        sim.say(1, Identity(second, ""))
    assert isinstance(sim.inbox[1][-1], World)


def test_nodes_that_set_up_get_more_time_but_not_those_that_are_missing() -> None:
    sim = Sim(RULES)
    two(sim)
    sim.say(0, looked())
    sim.say(1, looked())
    sim.advance(500)
    assert not sim.job.finished
    sim.advance(700)
    assert sim.job.finished
    alone = Sim(RULES)
    alone.join(0, has_identity=True)
    alone.say(0, looked())
    alone.advance(101)
    assert alone.job.finished


def test_a_builder_that_takes_too_long_is_not_waited_for() -> None:
    sim = Sim(RULES)
    two(sim)
    sim.say(0, looked())
    sim.say(1, looked())
    sim.advance(51)
    assert orders(sim, 1) == ["wait", "own"]


def test_a_node_that_is_lost_is_replaced_as_builder() -> None:
    sim = Sim(RULES)
    two(sim)
    sim.say(0, looked())
    sim.say(1, looked())
    sim.lose(0)
    assert orders(sim, 1) == ["wait", "build"]


def test_nodes_that_wait_for_another_job_get_the_time_of_set_up() -> None:
    """Before they can look: another one's set-up is at the same folder."""
    sim = Sim(RULES)
    two(sim)
    sim.say(0, SetupReport("waiting", "", "", ""))
    sim.advance(500)
    assert not sim.job.finished
    sim.advance(700)
    assert sim.job.finished


def test_a_node_that_never_has_it_leaves_time_for_set_up() -> None:
    sim = Sim(RULES)
    two(sim)
    for node in range(2):
        sim.say(node, looked(tree="t"))
    sim.say(0, SetupReport("fetched", "k", "t", ""))
    sim.advance(RULES.setup_wait_s + RULES.join_s)
    assert not sim.job.finished
    assert orders(sim, 0) == orders(sim, 1) == ["use", "own"]


def test_the_next_attempt_waits_for_an_environment_that_is_had_again() -> None:
    """No machine is left out for it, however often it comes."""
    sim = Sim(RULES._replace(max_restarts=3, backoff_s=0.0))
    two(sim)
    for node in range(2):
        sim.say(node, looked(tree="t"))
        sim.say(node, SetupReport("fetched", "k", "t", ""))
    for node in range(2):
        sim.say(node, Identity("same", ""))
    fault = (MountFault("env", "block 7", False),)
    for attempt in range(3):
        assert sim.world(0).attempt == attempt
        for node in range(2):
            sim.say(node, Started(attempt, 0.1))
        sim.say(1, SetupReport("unreadable", "k", "t", "block 7"))
        sim.fail(1, status=-7, mounts=fault)
        assert orders(sim, 1)[-1] == "use" and sim.world(0).attempt == attempt, "it is waited for"
        sim.say(1, SetupReport("fetched", "k", "t", ""))
        assert orders(sim, 1)[-1] == "show" and sim.world(0).attempt == attempt
        sim.say(1, SetupReport("ready", "k", "t", ""))
    assert sim.world(1).attempt == 3
    assert not any("left out" in str(each) for each in sim.inbox[0])
    pages = [unpack(each.data) for each in sim.inbox[0] if isinstance(each, FailureRecordMessage)]
    assert [page["class"] for page in pages if page] == ["mount"] * len(pages)


def test_an_environment_that_is_not_had_again_in_time_is_named() -> None:
    sim = Sim(RULES._replace(max_restarts=3, backoff_s=0.0))
    two(sim)
    for node in range(2):
        sim.say(node, looked(tree="t"))
        sim.say(node, SetupReport("fetched", "k", "t", ""))
    for node in range(2):
        sim.say(node, Identity("same", ""))
    sim.say(1, SetupReport("unreadable", "k", "t", "block 7"))
    sim.fail(1, status=-7)
    sim.run_until_idle()
    (finish,) = [each for each in sim.inbox[0] if isinstance(each, Finish)]
    assert "the environment was not remade on node" in finish.reason
