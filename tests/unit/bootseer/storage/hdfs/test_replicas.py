"""Which DataNodes are avoided, for how long, and in which order the others are asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.storage.hdfs.replicas import Replicas
from bootseer.tuning import DEFAULTS

BLAME_S = DEFAULTS.storage.hdfs_avoid_s

NODES = ["a:1", "b:1", "c:1"]


def test_nobody_is_to_blame_at_first() -> None:
    replicas = Replicas()
    assert not replicas.any_suspect(0.0)
    assert [replicas.order(NODES, turn, 0.0)[0] for turn in range(4)] == ["a:1", "b:1", "c:1", "a:1"]


def test_of_one_or_two_each_is_suspect_at_once() -> None:
    for group in (["a:1"], ["a:1", "b:1"]):
        replicas = Replicas()
        replicas.blame(group, 0.0)
        assert all(replicas.is_suspect(node, 1.0) for node in group)


def test_of_three_it_takes_two_incidents() -> None:
    replicas = Replicas()
    replicas.blame(NODES, 0.0)
    assert not replicas.any_suspect(0.0)
    replicas.blame(["a:1", "d:1", "e:1"], 1.0)
    assert replicas.is_suspect("a:1", 1.0)
    assert not replicas.is_suspect("b:1", 1.0)


def test_blame_is_forgotten() -> None:
    replicas = Replicas()
    replicas.blame(["a:1"], 0.0)
    assert replicas.is_suspect("a:1", BLAME_S)
    assert not replicas.is_suspect("a:1", BLAME_S + 0.1)
    assert not replicas.any_suspect(BLAME_S + 0.1)


def test_who_serves_is_not_to_blame_any_more() -> None:
    replicas = Replicas()
    replicas.blame(["a:1"], 0.0)
    replicas.clear_blame("a:1")
    assert not replicas.any_suspect(0.0)


def test_suspects_come_last_the_one_blamed_longest_ago_first() -> None:
    replicas = Replicas()
    replicas.blame(["b:1"], 0.0)
    replicas.blame(["a:1"], 1.0)
    assert replicas.order(NODES, 5, 2.0) == ["c:1", "b:1", "a:1"]


@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=1),
    st.integers(-100, 100),
    st.lists(st.tuples(st.lists(st.sampled_from("abcdefgh"), min_size=1), st.floats(0, 100))),
    st.floats(0, 200),
)
def test_order_has_all_once_and_no_suspect_before_a_good_one(
    nodes: list[str], turn: int, incidents: list[tuple[list[str], float]], now_s: float
) -> None:
    replicas = Replicas()
    for group, at_s in incidents:
        replicas.blame(group, at_s)
    ordered = replicas.order(nodes, turn, now_s)
    assert sorted(ordered) == sorted(set(nodes))
    suspect = [replicas.is_suspect(node, now_s) for node in ordered]
    assert suspect == sorted(suspect)
