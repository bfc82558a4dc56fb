"""In which order the parts of a node learn of an attempt."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import cast

from launcher.agent.node_features import NodeFeature
from launcher.base.loop import Loop
from launcher.ranks.group import RankGroup
from launcher.supervisor.client import Exited
from tests.unit.launcher.agent.test_node import Group, make_node


def test_parts_learn_of_each_moment_in_order_and_of_the_end_in_reverse() -> None:
    loop, told = Loop(), list[tuple[str, str]]()

    def made(name: str) -> NodeFeature:
        def note(moment: str, *_: object) -> None:
            told.append((name, moment))

        return NodeFeature(**{moment: partial(note, moment) for moment in NodeFeature._fields})

    node, group = make_node(loop), Group()
    node.agent = SimpleNamespace(group=group)  # type: ignore[assignment]
    group.prepared_ns = group.spawn_began_ns = 1  # type: ignore[attr-defined]
    node._find_observers().features = made("first"), made("last")  # type: ignore[assignment]
    rank = group.ranks[0]
    for moment, call in (
        ("started", partial(node.observe_start, cast(RankGroup, group))),
        ("rank_ended", partial(node.note_exit, cast(RankGroup, group), rank, Exited(0, 7, 0, 5, 0.0, 0.1, 0))),
        ("stopping", node.stopping),
        ("first_step", partial(node._on_first_step, rank)),
        ("close", node.close),
    ):
        call()
        assert told == [("first", moment), ("last", moment)]
        told.clear()
    node.attempt_over()
    assert told == [("last", "over"), ("first", "over")], "what began last ends first"
    loop.close()


def test_a_feature_does_nothing_at_moments_that_it_does_not_name() -> None:
    feature, closed = NodeFeature(close=lambda: closed.append(1)), list[int]()
    feature.stopping()
    feature.over()
    assert closed == []
    feature.close()
    assert closed == [1]
