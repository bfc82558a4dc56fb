"""The test of the network between nodes: when there is one, what it waits for, who is left out after it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.health.finding import FAIL, OK, WARN
from bootseer.health.limits import Limits
from bootseer.health.pairs import count_rounds, find_partner
from launcher.coordinator.network_test import GROUP_NODES, MARGIN_S, READY_S, ROUND_S, JobNetworkTest
from launcher.rendezvous.messages import (
    CheckReport,
    Note,
    PairMeasured,
    PairOrder,
    PairPort,
    PairResult,
    WantPairs,
)
from tests.unit.launcher.jobsim import Sim, make_rules

BROKEN = "RuntimeError: NCCL error: ncclSystemError: NET/IB : Got completion from peer with error 12"


def measured(order: PairOrder, bad: frozenset[int] = frozenset()) -> PairResult:
    """Args: bad: nodes of the group that nothing goes through to."""
    found = []
    for turn in range(count_rounds(len(order.nodes))):
        partner = find_partner(len(order.nodes), order.own, turn)
        if partner is not None:
            is_bad = order.own in bad or partner in bad
            values = (None, None, None) if is_bad else (1e-4 if order.own < partner else None, 1e9, 0.0)
            found.append(PairMeasured(partner, "no answer in time" if is_bad else "", *values))
    return PairResult(order.number, tuple(found))


class Network(Sim):
    """Nodes that also measure; `bad`: a bad network, `mute`: say nothing of it, `unable`: cannot take part."""

    def __init__(self, nodes: int, **rules: object) -> None:
        base = {"min_nodes": nodes, "max_nodes": nodes, "max_restarts": 3, "check_pairs": "network"}
        super().__init__(make_rules(**{**base, **rules}))
        self.bad: set[int] = set()
        self.cut: set[int] = set()  # two nodes with nothing between them
        self.mute: set[int] = set()
        self.unable: set[int] = set()
        for node in range(1, nodes + 1):
            self.join(node)
        self.run_until_idle()

    def _answer(self, node: int, message) -> None:
        super()._answer(node, message)
        if node in self.mute:
            return
        if isinstance(message, WantPairs):
            self.say(node, PairPort(message.number, f"10.0.0.{node}", 0 if node in self.unable else 7000 + node))
        elif isinstance(message, PairOrder):
            bad = frozenset(place for place, each in enumerate(message.nodes) if each.port - 7000 in self.bad)
            found = measured(message, bad)
            ports = [each.port - 7000 for each in message.nodes]
            broken = [
                each._replace(error="refused") if {node, ports[each.partner]} == self.cut else each
                for each in found.measured
            ]
            self.say(node, found._replace(measured=tuple(broken)))

    def told(self, node: int = 1) -> list[CheckReport]:
        return [message for message in self.inbox[node] if isinstance(message, CheckReport)]

    def asked(self) -> int:
        return sum(isinstance(message, WantPairs) for message in self.inbox[1])

    def break_down(self, node: int = 2, said: str = BROKEN) -> None:
        self.now_s += 100
        self.fail(node, traceback=said, status=1)


def test_after_a_failure_of_the_network_all_measure_before_they_start_again() -> None:
    job = Network(4)
    job.break_down()
    assert job.asked() == 1 and job.world(1).attempt == 1
    (told,) = job.told()
    assert (told.level, told.check) == (OK, "pairs") and told.said.startswith("4 nodes, 6 links")
    job.run_until_idle()
    assert any(line.startswith("ok      pairs") for line in job.pages()[0]["checks"])


@pytest.mark.parametrize(
    ("when", "failure", "asked"),
    [
        ("network", {"traceback": BROKEN}, 1),
        ("network", {"traceback": "KeyError: 3"}, 0),
        ("always", {"traceback": "KeyError: 3"}, 1),
        ("off", {"traceback": BROKEN}, 0),
    ],
)
def test_when_there_is_a_test(when: str, failure: dict, asked: int) -> None:
    job = Network(3, check_pairs=when)
    job.now_s += 100
    job.fail(2, status=1, **failure)
    job.run_until_idle()
    assert job.asked() == asked and job.world(1).attempt == 1


def test_after_the_loss_of_a_node_only_where_that_was_asked_for() -> None:
    for when, asked in (("network", 0), ("always", 1)):
        job = Network(4, check_pairs=when, min_nodes=3)
        job.lose(4)
        job.run_until_idle()
        assert job.asked() == asked and job.world(1).group_world_size == 3


def test_a_node_with_a_bad_network_is_named_and_left_out_where_others_suffice() -> None:
    job = Network(4, min_nodes=3)
    job.bad = {3}
    job.break_down()
    assert job.asked() == 2, "once more, before anybody is blamed"
    (told,) = job.told(3)
    assert (told.level, told.where, told.is_own) == (FAIL, "node3", True) and "with 3 of 3 nodes" in told.said
    assert [message.is_own for message in job.told(1)] == [False]
    job.run_until_idle()
    assert job.ranks() == {1: 0, 2: 1, 4: 2}
    assert any("node3 is left out" in note.text for note in job.inbox[1] if isinstance(note, Note))
    assert (0, "exclude") in job.steps()
    for _ in range(3):  # until no restart is left
        job.break_down(1)
        job.run_until_idle()
    assert job.finish() is not None and "replay-advised" not in [step for _, step in job.steps()]
    assert any("pairs node3" in line for line in job.pages()[0]["checks"])


def test_who_is_named_is_to_blame_and_not_whose_ranks_failed() -> None:
    """Twice at node 2 would be its machine's matter, but for node 3."""
    for bad, left_out in ((set(), 2), ({3}, 3)):
        job = Network(4, min_nodes=3)
        job.break_down(said="OSError: [Errno 113] No route to host")
        job.run_until_idle()
        assert len(job.ranks()) == 4
        job.bad = bad
        job.break_down(said="OSError: [Errno 113] No route to host")
        job.run_until_idle()
        assert set(job.ranks()) == {1, 2, 3, 4} - {left_out}


@pytest.mark.parametrize("changes", [{}, {"min_nodes": 3, "excludes_nodes": False}])
def test_it_takes_part_again_where_nobody_is_left_out(changes: dict) -> None:
    job = Network(4, **changes)
    job.bad = {3}
    job.break_down()
    job.run_until_idle()
    assert len(job.told()) == 1 and len(job.ranks()) == 4 and job.world(1).attempt == 1


def test_who_is_bad_once_is_not_to_blame() -> None:
    job = Network(4, min_nodes=3)
    job.bad = {3}
    answer = job._answer

    def answer_better(node: int, message) -> None:
        if isinstance(message, WantPairs) and job.asked() == 2:
            job.bad = set()
        answer(node, message)

    job._answer = answer_better  # type: ignore[method-assign]
    job.break_down()
    job.run_until_idle()
    (told,) = job.told(2)
    assert (told.level, told.is_own) == (OK, False) and told.said.startswith("4 nodes, 6 links")
    assert len(job.ranks()) == 4


def test_what_else_was_bad_once_hides_no_link_that_is_bad_twice() -> None:
    """At first node 2 is bad with most others, then only its link to node 1 is."""
    job = Network(4, min_nodes=3)
    job.bad = {2}
    answer = job._answer

    def answer_better(node: int, message) -> None:
        if isinstance(message, WantPairs) and job.asked() == 2:
            job.bad, job.cut = set(), {1, 2}
        answer(node, message)

    job._answer = answer_better  # type: ignore[method-assign]
    job.break_down()
    (told,) = job.told()
    assert (told.level, told.where) == (WARN, "node2 to node1")
    job.run_until_idle()
    assert len(job.ranks()) == 4


def test_a_link_that_is_bad_is_reported_and_leaves_nobody_out() -> None:
    job = Network(4, min_nodes=3)
    job.cut = {1, 2}
    job.break_down()
    (told,) = job.told()
    assert (told.level, told.where, job.asked()) == (WARN, "node2 to node1", 2)
    job.run_until_idle()
    assert len(job.ranks()) == 4


def test_a_node_known_by_a_loopback_address_is_not_measured_by_others() -> None:
    test = JobNetworkTest(0, {1: "a", 2: "b", 3: "c"}, Limits(), 0.0)
    test.take()
    for node, address in ((1, "127.0.1.1"), (2, "10.0.0.2"), (3, "10.0.0.3")):
        test.receive(node, PairPort(0, address, 7), 0.0)
    assert [ask.node for ask in test.take()] == [2, 3]
    strange = JobNetworkTest(0, {1: "a", 2: "b", 3: "c"}, Limits(), 0.0)
    strange.take()
    for node, address in ((1, "nowhere"), (2, "10.0.0.2"), (3, "10.0.0.3")):
        strange.receive(node, PairPort(0, address, 7), 0.0)
    assert [ask.node for ask in strange.take()] == [2, 3], "nor one without an address"
    near = JobNetworkTest(0, {1: "a", 2: "b"}, Limits(), 0.0)
    near.take()
    for node in (1, 2):
        near.receive(node, PairPort(0, "127.0.0.1", 7 + node), 0.0)
    assert [ask.node for ask in near.take()] == [1, 2], "all on one machine"


@pytest.mark.parametrize("silent", ["mute", "unable"])
def test_who_does_not_take_part_holds_up_nothing_for_long(silent: str) -> None:
    job = Network(4)
    getattr(job, silent).add(2)
    job.break_down()
    began_s = job.now_s
    job.run_until_idle()
    assert job.world(1).attempt == 1 and job.now_s - began_s <= READY_S + 3 * ROUND_S + MARGIN_S + 1.5
    assert job.told()[0].said.startswith("3 nodes, 3 links")


def test_who_begins_and_does_not_end_holds_up_nothing_for_long() -> None:
    job = Network(3)
    began_s = job.now_s + 100

    def answer(node: int, message, old=job._answer) -> None:
        if node != 2 or not isinstance(message, PairOrder):
            old(node, message)

    job._answer = answer  # type: ignore[method-assign]
    job.break_down()
    job.run_until_idle()
    assert job.world(1).attempt == 1 and job.now_s - began_s <= 3 * ROUND_S + MARGIN_S + 1.5


def test_a_node_that_is_lost_meanwhile_is_not_waited_for() -> None:
    job = Network(4, min_nodes=3)
    job.mute = {4}
    job.break_down()
    assert job.world(1).attempt == 0
    job.lose(4)
    assert job.told()[0].said.startswith("3 nodes, 3 links") and job.world(1).attempt == 1


@pytest.mark.parametrize("join_s", [1.0, READY_S])
def test_its_time_is_not_that_for_nodes_to_come_back(join_s: float) -> None:
    job = Network(4, join_s=join_s)
    job.mute = {2}  # waited for as long as that takes
    job.break_down()
    job.run_until_idle()
    assert job.finish() is None and job.world(1).attempt == 1


def test_after_it_nodes_have_all_their_time_to_come() -> None:
    job = Network(4, join_s=20.0)
    job.mute = {1, 2, 3, 4}
    job.break_down()
    job.lose(4)
    job.advance(READY_S + 0.1)
    job.advance(19.0)
    assert job.finish() is None
    job.advance(1.1)
    assert job.finish() is not None


def test_a_signal_ends_the_job_in_the_middle_of_it() -> None:
    from launcher.rendezvous.messages import Signalled

    job = Network(3)
    job.mute = {1, 2, 3}
    job.break_down()
    job.say(1, Signalled(15))
    assert job.finish() is not None and job.job.deadline_s() is None


def test_answers_of_nobody_who_was_asked_change_nothing() -> None:
    test = JobNetworkTest(3, {1: "a", 2: "b"}, Limits(), 0.0)
    test.receive(1, PairResult(3, ()), 0.0)  # nothing was ordered yet
    test.receive(9, PairPort(3, "10.0.0.9", 1), 0.0)
    test.receive(1, PairPort(2, "10.0.0.1", 1), 0.0)
    test.take()
    assert not test.is_over
    for node in (1, 2):
        test.receive(node, PairPort(3, "10.0.0.1", 1), 1.0)
    assert [(ask.node, ask.message.own) for ask in test.take() if isinstance(ask.message, PairOrder)] == [
        (1, 0),
        (2, 1),
    ]
    nonsense = (
        PairMeasured(7, "", 1.0, 1.0, 0.0),
        PairMeasured(-1, "", 1.0, 1.0, 0.0),
        PairMeasured(0, "", 1.0, 1.0, 0.0),
    )
    for node in (1, 2):
        test.receive(node, PairResult(3, nonsense[: 3 - node + 1] if node == 1 else nonsense[:2]), 1.0)
    assert test.is_over
    assert test.named == {} and len(test.findings) == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 3 * GROUP_NODES), st.data())
def test_larger_jobs_measure_in_groups(nodes: int, data) -> None:
    test = JobNetworkTest(0, {10 * node: f"host{node % 50}" for node in range(nodes)}, Limits(), 0.0)
    bad = data.draw(st.integers(0, nodes - 1)) if nodes % GROUP_NODES > 2 or nodes % GROUP_NODES == 0 else None
    while not test.is_over:
        for ask in test.take():
            if isinstance(ask.message, WantPairs):
                answer = PairPort(ask.message.number, "10.0.0.1", 1 + ask.node // 10)
                test.receive(ask.node, answer, 0.0)
                continue
            assert len(ask.message.nodes) <= GROUP_NODES
            ports = [each.port for each in ask.message.nodes]
            place = frozenset(number for number, port in enumerate(ports) if bad is not None and port == bad + 1)
            test.receive(ask.node, measured(ask.message, place), 1.0)
    assert set(test.named) == ({10 * bad} if bad is not None and nodes > 2 else set())
