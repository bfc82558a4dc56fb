"""Two hosts in network namespaces: what the job does when one dies, is cut off, or has another clock.

The scenarios are those of `python -m bench hosts`, which also measures them with default heartbeats.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench import hosts as scenarios
from bench import netns
from tests.support import lacking

pytestmark = [pytest.mark.system, pytest.mark.slow]


@pytest.fixture
def two_hosts() -> Iterator[netns.Hosts]:
    reason = netns.why_not()
    if reason:
        lacking(reason)
    with netns.Hosts(2) as made:
        yield made


def test_survivor_of_an_elastic_job_goes_on_alone(two_hosts: netns.Hosts) -> None:
    outcome = scenarios.node_killed(two_hosts)
    assert outcome.blamed == "node2"
    assert outcome.seconds < 5


def test_fixed_job_without_restarts_ends_and_names_the_lost_node(two_hosts: netns.Hosts) -> None:
    outcome = scenarios.node_killed_fixed(two_hosts)
    assert outcome.blamed == "node2"
    assert outcome.statuses[0] == 1
    # The kernel may end the rank there before its agent: then rank 0 has failed of that before the node is missed.
    whys = "the job needs 2 nodes and --max-restarts is 0", "Root Cause"
    assert any(why in outcome.outputs[0] for why in whys), outcome.outputs[0]


def test_cut_of_three_seconds_restarts_nothing(two_hosts: netns.Hosts) -> None:
    outcome = scenarios.cut_for_a_while(two_hosts)
    assert outcome.what == "went on, no restart"
    assert outcome.statuses == (0, 0)


@pytest.mark.parametrize(("nodes", "what"), [("2", "went on, no restart"), ("1:2", "restarted")])
def test_cut_beyond_the_limit_loses_nobody(two_hosts: netns.Hosts, nodes: str, what: str) -> None:
    conf = "last_call_timeout=5,keep_alive_interval=0.3,keep_alive_max_attempt=4"
    outcome = scenarios.cut_beyond_the_limit(two_hosts, nodes, conf)
    assert (outcome.what, outcome.statuses) == (what, (0, 0)), outcome.outputs
    assert not any("is gone" in output for output in outcome.outputs)


def test_cut_for_good_is_found_by_heartbeat_on_both_sides(two_hosts: netns.Hosts) -> None:
    conf = "last_call_timeout=5,keep_alive_interval=0.5,keep_alive_max_attempt=4"
    outcome = scenarios.cut_for_good(two_hosts, conf)
    assert outcome.blamed == "node2"
    assert outcome.seconds < 10
    assert outcome.statuses[1] == 1
    assert "the coordinator" in outcome.outputs[1]


@pytest.mark.parametrize("ahead_s", [(0, 5), (5, 0)], ids=["cause", "victim"])
def test_cause_is_found_although_clocks_are_five_seconds_apart(
    two_hosts: netns.Hosts, ahead_s: tuple[int, int]
) -> None:
    outcome = scenarios.clocks_apart(two_hosts, ahead_s)
    assert outcome.blamed == "rank 1"
    assert outcome.statuses == (1, 1)
