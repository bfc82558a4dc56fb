"""Who waits for rank 0's store, and how long."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from launcher.base.loop import Loop
from launcher.ranks import rank0_ready as head_start
from launcher.ranks.port import hold_any, is_served
from launcher.ranks.rank0_ready import ReadinessWait
from launcher.rendezvous.messages import World


class Bed:
    def __init__(self) -> None:
        self.loop = Loop()
        self.told: list[int] = []
        self.done: list[str] = []
        self.head_start = ReadinessWait(self.loop, self.told.append)

    def follow(self, attempt: int) -> None:
        self.head_start.follow(world(attempt), lambda: self.done.append(str(attempt)))

    def run(self, is_over: Callable[[], object]) -> None:
        end_s = self.loop.time() + 10
        while not is_over() and self.loop.time() < end_s:
            self.loop.run_once(0.05)


def world(attempt: int, port: int = 1) -> World:
    return World(attempt, 0, 1, 2, 1, 2, 1, 2, "h", port)


def test_ranks_wait_until_it_is_received_that_rank_0_listens() -> None:
    bed = Bed()
    bed.follow(1)
    bed.head_start.heard(0)  # of the attempt before
    assert bed.done == []
    bed.head_start.heard(1)
    bed.head_start.heard(1)
    assert bed.done == ["1"]
    bed.follow(1)  # known already
    assert bed.done == ["1", "1"]
    bed.loop.close()


def test_they_do_not_wait_for_long() -> None:
    bed = Bed()
    began_s = bed.loop.time()
    bed.follow(0)
    assert bed.done == []
    bed.run(lambda: bed.done)
    assert bed.done == ["0"] and bed.loop.time() - began_s >= head_start.HEAD_START_S
    bed.loop.close()


def test_nobody_is_started_for_an_attempt_that_is_over() -> None:
    bed = Bed()
    bed.follow(0)
    bed.head_start.over()
    bed.head_start.heard(0)
    bed.loop.call_later(2 * head_start.HEAD_START_S, bed.done.append, "later")
    bed.run(lambda: bed.done)
    assert bed.done == ["later"]
    bed.loop.close()


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_it_is_reported_when_somebody_listens_on_the_port(family: socket.AddressFamily) -> None:
    bed = Bed()
    held = hold_any(None)  # as the agent holds it
    bed.head_start.watch_port(world(3, held.port))
    bed.loop.run_once(0.05)
    assert bed.told == []
    with socket.socket(family, socket.SOCK_STREAM) as server:
        if family == socket.AF_INET6:
            server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("", held.port))
        assert not is_served(held.port)  # not yet
        server.listen()
        bed.run(lambda: bed.told)
        assert bed.told == [3]
    held.close()
    bed.loop.close()


def test_it_is_not_looked_for_when_the_attempt_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(head_start, "is_served", looked.append)
    bed = Bed()
    bed.head_start.watch_port(world(0, 7))
    bed.head_start.over()
    bed.loop.call_later(0.05, bed.done.append, "later")
    bed.run(lambda: bed.done)
    assert looked == [7]
    bed.loop.close()


def test_it_is_looked_for_less_often_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(head_start, "is_served", looked.append)
    for name, value in (("SOON_S", 0.02), ("LATER_LOOK_S", 0.04), ("GIVE_UP_S", 0.1)):
        monkeypatch.setattr(head_start, name, value)
    bed = Bed()
    bed.head_start.watch_port(world(0, 7))
    bed.loop.call_later(0.4, bed.done.append, "later")
    bed.run(lambda: bed.done)
    assert 3 <= len(looked) <= 16  # each 2 ms it would be 50
    assert bed.told == []
    bed.loop.close()
