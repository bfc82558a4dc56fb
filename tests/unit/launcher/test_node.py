"""What a node does around its ranks."""

from __future__ import annotations

import time
from typing import cast

from bootseer.errors import ConfigError
from launcher.cli import parse
from launcher.guard_client import GuardClient
from launcher.loop import Loop
from launcher.node import Node
from launcher.ranks.console import Console
from launcher.ranks.group import Rank, RankGroup
from launcher.ranks.logs import RankLogs
from launcher.rendezvous.messages import World
from launcher.spec import build_spec


class Group:
    """Ranks that cannot be started."""

    def __init__(self) -> None:
        self.world = World(0, 0, 0, 1, 0, 1, 0, 1, "h", 1)
        self.ranks = [Rank(0, 0, RankLogs(None, None, False, False, ""), "")]
        self.is_stopping = False
        self.why: list[str] = []

    def begin_spawn(self) -> None:
        """Nothing is missing."""

    def spawn(self, *_how: object) -> None:
        raise ConfigError("--numa-binding: there is no such node")

    def cannot_start(self, why: str) -> None:
        self.why.append(why)


class Checkpoint:
    """Calls back when its test says so."""

    def load(self, _world: World, then: object) -> None:
        self.then = then


def test_ranks_that_cannot_be_started_after_a_load_are_the_agents_business() -> None:
    """Nobody is above the callback but the loop."""
    loop = Loop()
    environ = {"OMP_NUM_THREADS": "1"}
    spec = build_spec(parse(["--fork-ranks", "off", __file__], environ), environ)
    node = Node(loop, Console(loop), cast(GuardClient, None), spec, time.monotonic_ns())
    group, checkpoint = Group(), Checkpoint()
    node.checkpoint = checkpoint  # type: ignore[assignment]
    node.spawn(cast(RankGroup, group))
    assert group.why == []
    checkpoint.then({})  # type: ignore[operator]
    assert group.why == ["--numa-binding: there is no such node"]
    loop.close()
