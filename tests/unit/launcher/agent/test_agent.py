"""What the agent does after a signal if the coordinator does not act on it."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.agent.agent import SIGNAL_PATIENCE_S, Agent
from launcher.cli.parser import parse
from launcher.rendezvous.messages import (
    DroppedFromJob,
    Finish,
    Leave,
    Note,
    Signalled,
    Stop,
    Stopped,
    Welcome,
    World,
)
from launcher.spec import build_spec
from tests.unit.launcher.fake_loop import FakeLoop

OMP = {"OMP_NUM_THREADS": "1"}
ENDPOINT = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "h:1")
WORLD = World(0, 0, 1, 2, 1, 2, 1, 2, "h", 1)
STOP = Stop(0, signal.SIGTERM, 30.0, "rank 0 has failed")
INTERRUPT = signal.SIGINT
AFTER_S = SIGNAL_PATIENCE_S + 0.1


class Port:
    """The port for the next attempt."""

    port = number = 1

    def close(self) -> None:
        pass

    drop = renew = close


class Ranks:
    """The ranks of an attempt."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.failures: list[Any] = []
        self.ended: list[int] = []
        self.stops: list[int] = []

    def stop(self, signum: int, _grace_s: float) -> None:
        self.stops.append(signum)


class Bed:
    """An agent on a node and a link that only record what it does."""

    def __init__(self) -> None:
        self.loop = FakeLoop()
        self.sent: list[Any] = []
        self.rejoined: list[int] = []
        self.ranks: list[Ranks] = []
        link = SimpleNamespace(
            is_local=False, send=self.sent.append, rejoin=self.rejoined.append, close=lambda: None, is_closed=True
        )
        spec = build_spec(parse([*ENDPOINT, __file__], OMP), OMP)
        self.agent: Any = Agent(self.loop, spec, self, Port())  # type: ignore[arg-type]
        self.agent.connect(None, link)
        self.agent.on_message(Welcome(1, False))

    def __getattr__(self, _name: str) -> Any:
        """The rest of the node."""
        return lambda *_: None

    def prepare(self, world: World) -> Ranks:
        self.ranks.append(Ranks(world))
        return self.ranks[-1]

    def reached(self) -> tuple[int, None]:
        return -1, None

    def traces(self) -> bytes:
        return b""

    def run(self) -> Ranks:
        self.agent.on_message(WORLD)
        return self.ranks[-1]

    @property
    def kinds(self) -> list[type]:
        return [type(message) for message in self.sent]


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_other_messages_are_no_answer_to_a_signal(bed: Bed) -> None:
    ranks = bed.run()
    bed.agent.on_signal(INTERRUPT)
    bed.agent.on_message(Note("on its way"))
    bed.loop.advance(AFTER_S)
    assert ranks.stops == [INTERRUPT] and bed.kinds == [Signalled]
    bed.agent.on_stopped([], [])
    assert bed.sent[1:] == [Leave("stopped by SIGINT")] and bed.agent.status == 130


@pytest.mark.parametrize("message", [STOP, Finish(130, "stopped by SIGINT", (), (), ())])
def test_with_an_order_the_node_does_not_leave(bed: Bed, message: Any) -> None:
    bed.run()
    bed.agent.on_signal(INTERRUPT)
    bed.agent.on_message(message)
    if message is STOP:
        bed.agent.on_stopped([], [])
    bed.loop.advance(AFTER_S)
    assert Leave not in bed.kinds


def test_a_second_signal_is_waited_for_again(bed: Bed) -> None:
    """The first one came while the ranks were being stopped, after which the coordinator hangs."""
    bed.run()
    bed.agent.on_message(STOP)
    bed.agent.on_signal(INTERRUPT)
    bed.loop.advance(AFTER_S)
    bed.agent.on_stopped([], [])
    bed.loop.advance(60.0)
    assert bed.kinds == [Signalled, Stopped]
    bed.agent.on_signal(INTERRUPT)
    bed.loop.advance(AFTER_S)
    assert bed.kinds == [Signalled, Stopped, Signalled, Leave] and bed.agent.status == 130


@pytest.mark.parametrize("has_ranks", [False, True])
def test_a_node_that_was_dropped_after_a_signal_does_not_join_again(bed: Bed, has_ranks: bool) -> None:
    if has_ranks:
        bed.run()
    bed.agent.on_signal(INTERRUPT)
    bed.agent.on_message(DroppedFromJob("it was silent"))
    if has_ranks:
        bed.agent.on_stopped([], [])
    assert bed.rejoined == [] and bed.kinds == [Signalled, Leave] and bed.agent.status == 130
