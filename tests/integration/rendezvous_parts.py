"""What the tests of the rendezvous share: one loop with a coordinator and nodes on it, and a node as a process.

`python rendezvous_parts.py KEY=VALUE ...` is such a process: one node that says as lines of JSON what it is told.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from launcher.agent.member import Member, RendezvousSettings, open_link
from launcher.base.loop import Loop
from launcher.coordinator.host import JobHost
from launcher.coordinator.job import Job, JobRules
from launcher.coordinator.run_events import RunEvents
from launcher.coordinator.server import Coordinator, Limits
from launcher.rendezvous.endpoint import try_to_host
from launcher.rendezvous.messages import (
    Finish,
    FromCoordinator,
    Join,
    Leave,
    Note,
    Refused,
    Started,
    Stop,
    Stopped,
    Succeeded,
    World,
)
from launcher.rendezvous.resolve import Address

SECRET = b"the secret of the tests"
DEADLINE_S = 20.0


def make_join(number: int, nodes: int = 2, least: int | None = None, address: str = "", rank: int = -1) -> Join:
    return Join(
        "run",
        f"node{number}",
        address,
        os.getpid(),
        rank,
        "default",
        1,
        least or nodes,
        nodes,
        0,
        40000 + number,
        False,
    )


class Bed:
    """A loop, and waiting on it."""

    def __init__(self) -> None:
        self.loop = Loop()
        self.lines: list[str] = []
        self._ends: list[Callable[[], object]] = []

    def until(self, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
        end_s = time.monotonic() + deadline_s
        while not (found := condition()):
            assert time.monotonic() < end_s, f"not within {deadline_s} s; lines: {self.lines}"
            self.loop.run_once(0.05)
        return found

    def run_for(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            self.loop.run_once(0.02)

    def at_end(self, call: Callable[[], object]) -> None:
        self._ends.append(call)

    def close(self) -> None:
        for call in reversed(self._ends):
            call()
        self.loop.close()


class Server:
    """A coordinator on a bed."""

    def __init__(
        self,
        bed: Bed,
        nodes: int = 2,
        secret: bytes | None = SECRET,
        limits: Limits | None = None,
        least: int | None = None,
        port: int = 0,
        events: RunEvents | None = None,
        **rules: Any,
    ) -> None:
        self.bed = bed
        self.host = JobHost(bed.loop, Job(JobRules("run", least or nodes, nodes, **rules)), events=events)
        bound = try_to_host("127.0.0.1", [Address(socket.AF_INET, "127.0.0.1")], port, True)
        assert bound.listener is not None, bound.reason
        self.coordinator = Coordinator(
            bed.loop, self.host, bound.listener, secret, "1.0", bed.lines.append, limits or Limits(goodbye_s=1.0)
        )
        self.port = self.coordinator.port
        bed.at_end(self.close)

    def close(self) -> None:
        self.coordinator.close("the test is over")
        self.bed.until(lambda: self.coordinator.is_closed)

    def count(self, name: str) -> int:
        return self.coordinator.statistics()[name]


class Node:
    """A node on a bed: a Member with an agent that does what it is told, without ranks."""

    def __init__(self, bed: Bed, settings: RendezvousSettings, join: Join, host: JobHost | None = None) -> None:
        self.bed = bed
        self.told: list[FromCoordinator] = []
        self.lost: list[str] = []
        self.port = join.master_port

        def make_host() -> JobHost:
            return host or JobHost(bed.loop, Job(JobRules("run", join.min_nodes, join.max_nodes)))

        self.member = open_link(
            bed.loop, settings, join, make_host, self._on_message, self.lost.append, bed.lines.append
        )
        bed.at_end(self.close)

    def _on_message(self, message: FromCoordinator) -> None:
        self.told.append(message)
        if isinstance(message, World):
            self.member.send(Started(message.attempt, 0.0))
        elif isinstance(message, Stop):
            self.member.send(Stopped(message.attempt, (), self.port, False))
        elif isinstance(message, Finish | Refused):
            self.member.close()

    def last(self, kind: type) -> Any:
        return next((message for message in reversed(self.told) if isinstance(message, kind)), None)

    def succeed(self) -> None:
        self.member.send(Succeeded(self.last(World).attempt))

    def close(self) -> None:
        self.member.close()
        self.bed.until(lambda: self.member.is_closed)


def settings(port: int, **values: Any) -> RendezvousSettings:
    """Fast ones, for tests."""
    return RendezvousSettings("127.0.0.1", port, **{"secret": SECRET, "join_timeout_s": 10.0, **values})


@contextmanager
def raw(port: int, *data: bytes) -> Iterator[socket.socket]:
    """A plain connection that has sent this."""
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.settimeout(DEADLINE_S)
        for piece in data:
            sock.sendall(piece)
        yield sock


def main(argv: list[str]) -> None:
    """One node as a process: `port=`, `number=`, `nodes=`, any field of RendezvousSettings."""
    values: dict[str, Any] = {}
    for word in argv:
        name, _, text = word.partition("=")
        values[name] = json.loads(text)
    number, nodes = values.pop("number"), values.pop("nodes", 2)
    least, lives_s = values.pop("least", None), values.pop("lives_s", 60.0)
    host = values.pop("host", "127.0.0.1")
    secret = values.pop("secret", SECRET.decode())
    loop = Loop()
    done: list[int] = []
    member: Member | None = None

    def on_message(message: FromCoordinator) -> None:
        if not isinstance(message, Note):
            print(json.dumps([type(message).__name__, *message]), flush=True)
        assert member is not None
        if isinstance(message, Stop):
            member.send(Stopped(message.attempt, (), 40000, False))
        if isinstance(message, Finish | Refused):
            member.close()
            done.append(message.status)

    def on_lost(reason: str) -> None:
        print(json.dumps(["lost", reason]), flush=True)
        done.append(1)

    def leave() -> None:
        assert member is not None
        member.send(Leave("asked to"))
        member.close()
        done.append(0)

    member = open_link(
        loop,
        RendezvousSettings(host, secret=secret.encode() if secret else None, **values),
        make_join(number, nodes, least),
        lambda: JobHost(loop, Job(JobRules("run", least or nodes, nodes, last_call_s=0.5))),
        on_message,
        on_lost,
        lambda text: print(json.dumps(["say", text]), flush=True),
    )
    loop.add_signal_handler(signal.SIGTERM, leave)
    loop.call_later(lives_s, done.append, 3)
    while not done or not member.is_closed:
        loop.run_once(0.5)
    sys.exit(done[0])


if __name__ == "__main__":
    main(sys.argv[1:])
