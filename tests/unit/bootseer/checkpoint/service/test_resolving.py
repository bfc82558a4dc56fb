"""What the keeper makes of a version that is not there, not yet there, or not found in time."""

from __future__ import annotations

import asyncio
import json
import os
import selectors
import socket
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from bootseer.checkpoint.service import resolving
from bootseer.checkpoint.service.process import Child
from bootseer.checkpoint.service.resolving import NOTHING, UNUSABLE, Resolver, may_appear, outcome, run_resolver
from bootseer.checkpoint.versions.resolve import PLAIN, NoCompleteCheckpoint, Pinned
from bootseer.errors import CheckpointError, IntegrityError, NotFound, SourceChanged, Unavailable
from bootseer.ipc.channel import Channel

PINNED = Pinned(PLAIN, "ckpt", "step-3", "d" * 64, ())


def test_only_what_surely_is_no_checkpoint_is_absent() -> None:
    assert outcome(NotFound("x")) == {"absent": "x", "kind": NOTHING}
    assert outcome(NoCompleteCheckpoint("x")) == {"absent": "x", "kind": UNUSABLE}
    for error in (CheckpointError("x"), IntegrityError("x"), Unavailable("x"), SourceChanged("x")):
        assert outcome(error) == {"failed": "x"}


def test_what_another_node_has_seen_is_looked_for_again() -> None:
    for error in (NotFound("x"), SourceChanged("x")):
        assert may_appear(error, True, 0.0)
        assert not may_appear(error, True, resolving.PIN_TRIES_S)
    assert not may_appear(IntegrityError("x"), True, 0.0)
    assert not may_appear(NotFound("x"), False, 0.0)  # a first start is not held up
    assert may_appear(SourceChanged("x"), False, 0.0)


@pytest.mark.parametrize("first", [NotFound("an old listing"), SourceChanged("an old listing")])
def test_the_process_tries_again(first: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Any] = [first, PINNED]
    told: list[dict[str, Any]] = []

    async def pin(*_args: object) -> Pinned:
        found = outcomes.pop(0)
        if isinstance(found, Exception):
            raise found
        assert isinstance(found, Pinned)
        return found

    monkeypatch.setattr(resolving, "pin", pin)
    monkeypatch.setattr(resolving, "PIN_WAIT_S", 0.0)
    monkeypatch.setattr(resolving, "run_child", lambda _connection, work: told.append(asyncio.run(work())))
    with socket.socket() as connection:
        run_resolver(connection, "/tmp/ckpt", "step-3", "d" * 64)
    assert msgspec.convert(told[0]["pinned"], Pinned) == PINNED and not outcomes


# ---- the keeper's side ---------------------------------------------------------------------------------------


class Process:
    """In place of the process: the test says its lines."""

    def __init__(self) -> None:
        self.ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.pid = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})

    def say(self, **news: object) -> None:
        self.theirs.sendall(json.dumps(news).encode() + b"\n")


class Setting:
    def __init__(self, said: list[str]) -> None:
        self.selector = selectors.DefaultSelector()
        self.process = Process()
        self.said = said
        self.found: list[dict[str, Any]] = []
        self.resolver = Resolver(self.selector, self.fork, lambda: self.said.append("alive"))

    def fork(self, _work: Callable[[socket.socket], None]) -> Child:
        return Child(self.process.pid, Channel(self.process.ours))

    def ask(self) -> None:
        self.resolver.ask("url", "", "", self.found.append)

    def turn(self) -> None:
        for key, _ in self.selector.select(20):
            key.data()


@pytest.fixture
def setting(said: list[str]) -> Iterator[Setting]:
    found = Setting(said)
    yield found
    found.resolver.drop()
    found.process.theirs.close()
    found.selector.close()


def test_signs_of_life_go_on_to_the_launcher(setting: Setting) -> None:
    setting.ask()
    setting.process.say(alive=True)
    setting.turn()
    setting.process.say(waiting="the store")
    setting.turn()
    assert setting.said == ["alive", "trying again: the store"] and not setting.found
    setting.process.say(pinned=1)
    setting.turn()
    assert setting.found == [{"pinned": 1}] and not setting.selector.get_map()


@pytest.mark.parametrize("limit", ["LIMIT_S", "SILENCE_LIMIT_S"])
def test_what_hangs_is_given_up(limit: str, setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    setting.ask()
    setting.resolver.tick()
    assert not setting.found
    setting.resolver.drop()
    setting.process.theirs.close()
    setting.process = Process()
    monkeypatch.setattr(resolving, limit, -1.0)
    setting.ask()
    setting.resolver.tick()
    assert setting.found == [{"failed": "the version was not found in time"}]
    with pytest.raises(ChildProcessError):
        os.waitpid(setting.process.pid, os.WNOHANG)


def test_a_process_that_dies_or_cannot_be_started(setting: Setting) -> None:
    setting.ask()
    setting.process.theirs.shutdown(socket.SHUT_RDWR)
    setting.turn()
    assert "has died" in setting.found[0]["failed"]

    def no_fork(_work: Callable[[socket.socket], None]) -> Child:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    resolver = Resolver(setting.selector, no_fork, lambda: None)
    resolver.ask("url", "", "", setting.found.append)
    assert "Resource temporarily unavailable" in setting.found[1]["failed"]
