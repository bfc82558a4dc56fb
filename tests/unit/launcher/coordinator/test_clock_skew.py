"""Whose wall clock is said to differ, and when that is over; in a job, to whom it is told."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.health.changes import CALM_ROUNDS, Change
from bootseer.health.finding import FAIL, WARN
from bootseer.health.limits import Limits
from launcher.coordinator import clock_skew
from launcher.coordinator.clock_skew import ClockWatch
from launcher.rendezvous.messages import CheckReport, ClockReading
from tests.unit.launcher.jobsim import Sim, make_rules

EPOCH_S = 1.7e9


def say(watch: ClockWatch, node: int, off_s: float, at_s: float = 1000.0, error_s: float = 0.001) -> bool:
    return watch.said(node, int((EPOCH_S + at_s + off_s) * 1e9), int(at_s * 1e9), int(error_s * 1e9))


def look(offsets_s: list[float], error_s: float = 0.001) -> list[tuple[str, str, float | None]]:
    watch = ClockWatch(Limits())
    for node, off_s in enumerate(offsets_s):
        say(watch, node, off_s, at_s=1000.0 + node, error_s=error_s)
    found = watch.look({node: f"node{node}" for node in range(len(offsets_s))})
    return [(change.finding.level, change.finding.where, change.finding.measured) for change in found]


def test_the_one_that_differs_is_named() -> None:
    assert look([0.0, 0.1, -7.0, 0.05]) == [(WARN, "node2", 7.0)]
    assert look([0.0, 0.1, 3600.0]) == [(FAIL, "node2", 3599.9)]
    assert look([5.0, 0.0, 0.1]) == [(WARN, "node0", 4.9)], "also where it is that of the coordinator"


def test_of_two_nobody_knows_which() -> None:
    assert look([0.0, 9.0]) == [(WARN, "node0 and node1", 9.0)]


def test_what_cannot_be_reported_apart_is_in_order() -> None:
    assert look([0.0, 0.3, 0.4]) == []
    assert look([0.0, 0.0, 2.0], error_s=1.0) == []
    assert look([3.0]) == []


def test_nothing_is_said_before_all_have_spoken_nor_of_the_lost() -> None:
    watch = ClockWatch(Limits())
    say(watch, 0, 0.0)
    say(watch, 1, 30.0)
    hosts = {0: "a", 1: "b", 2: "c"}
    assert watch.look(hosts) == []
    watch.lost(1)
    say(watch, 2, 0.0)
    assert watch.look(hosts) == [] and watch.look({0: "a", 2: "c"}) == []


def test_clocks_are_compared_once_in_a_round_of_all_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []

    class Counting(ClockWatch):
        def look(self, hosts: dict[int, str]) -> list[Change]:
            compared.append(len(hosts))
            return super().look(hosts)

    monkeypatch.setattr(clock_skew, "ClockWatch", Counting)
    nodes, rounds = 20, 3
    job = Sim(make_rules(min_nodes=nodes, max_nodes=nodes))
    for node in range(nodes):
        job.join(node)
    for number in range(rounds):
        for node in range(nodes):
            wall_s = EPOCH_S + 9 * (node == 7 and number == 1)
            job.say(node, ClockReading(int(wall_s * 1e9), 0, 1000))
    assert compared == [nodes] * (1 + rounds), "with the first reading, and with the last one of each round"
    assert [(each.where, each.is_over) for each in job.inbox[0] if isinstance(each, CheckReport)] == [
        ("node7", False)
    ]


def test_a_round_does_not_wait_for_lost_nodes_and_waits_for_new_ones() -> None:
    watch = ClockWatch(Limits())
    hosts = {0: "a", 1: "b", 2: "c"}
    for node in hosts:
        say(watch, node, 0.0)
    assert watch.look(hosts) == []
    watch.lost(2)
    say(watch, 0, 0.0)
    say(watch, 3, 9.0)
    assert say(watch, 1, 0.0), "all that are left have sent one"
    hosts = {0: "a", 1: "b", 4: "d"}
    assert watch.look(hosts) == []
    assert not say(watch, 0, 0.0)
    assert say(watch, 4, 9.0)
    assert [change.finding.where for change in watch.look(hosts)] == ["d"]


@settings(deadline=None)
@given(st.lists(st.floats(-0.1, 0.1), min_size=2, max_size=9), st.floats(1, 1e6), st.booleans(), st.data())
def test_one_of_many_is_named_whichever(offsets_s: list[float], skew_s: float, is_behind: bool, data) -> None:
    place = data.draw(st.integers(0, len(offsets_s)))
    offsets_s.insert(place, -skew_s if is_behind else skew_s)
    assert [where for _, where, _ in look(offsets_s)] == [f"node{place}"]


def test_a_job_tells_all_its_nodes_once_and_when_it_is_over() -> None:
    job = Sim(make_rules(min_nodes=3, max_nodes=3, max_restarts=1))
    for node in (1, 2, 3):
        job.join(node)

    def speak(off_s: float) -> None:
        for node in (1, 2, 3):
            wall_s = EPOCH_S + 50 + (off_s if node == 3 else 0)
            job.say(node, ClockReading(int(wall_s * 1e9), int(50e9), 1000))

    def told(node: int) -> list[tuple[str, str, bool]]:
        return [
            (each.level, each.where, each.is_over) for each in job.inbox[node] if isinstance(each, CheckReport)
        ]

    speak(4.0)
    speak(4.1)
    assert told(1) == told(3) == [(WARN, "node3", False)]
    job.now_s = 100.0
    job.fail(2)
    job.run_until_idle()
    assert any("clock-skew node3" in line for line in job.pages()[0]["checks"])
    for _ in range(CALM_ROUNDS):
        speak(0.0)
    assert told(2) == [(WARN, "node3", False), (WARN, "node3", True)]
