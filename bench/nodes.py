"""The processes of `bench rendezvous`: the coordinator (real Job, JobHost and TCP side) and the simulated nodes.

Run as `python -m bench.nodes coordinator|nodes ARGUMENTS`; orders come as lines on standard input, answers go out
as lines of JSON. A simulated node is the real Connection with an agent that starts nothing.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from launcher.base.loop import Loop
from launcher.coordinator.host import JobHost
from launcher.coordinator.job import Job, JobRules
from launcher.coordinator.server import Coordinator
from launcher.rendezvous.connection import Callbacks, Connection, Ended, Timing
from launcher.rendezvous.endpoint import try_to_host
from launcher.rendezvous.messages import (
    Finish,
    FromCoordinator,
    Identity,
    Join,
    Refused,
    Started,
    Stop,
    Stopped,
    Succeeded,
    Welcome,
    World,
)
from launcher.rendezvous.resolve import Address

RUN_ID = "bench"
DIGEST = "0123456789abcdef" * 4
PACE_S = 0.001
BATCH = 8  # connections that one process opens at once


def answer(**fields: Any) -> None:
    """One line for the process that gives the orders."""
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def listen(loop: Loop, on_order: Callable[[list[str]], None]) -> None:
    """Orders from standard input; its end ends this process."""
    pending = bytearray()

    def read() -> None:
        data = os.read(0, 65536)
        if not data:
            os._exit(0)
        pending.extend(data)
        while b"\n" in pending:
            line, _, rest = bytes(pending).partition(b"\n")
            pending[:] = rest
            on_order(line.decode().split())

    loop.add_reader(0, read)


def run_coordinator(agents: int, secret: bytes | None) -> None:
    """The coordinator of a job of `agents` nodes; says its port, then its counters when asked."""
    loop = Loop()
    rules = JobRules(RUN_ID, agents - 1, agents, max_restarts=3, open_membership=secret is None)
    host = JobHost(loop, Job(rules))
    address = Address(socket.AF_INET, "127.0.0.1")
    bound = try_to_host("127.0.0.1", [address], 0, True)
    if bound.listener is None:
        raise SystemExit(f"cannot listen: {bound.reason}")
    coordinator = Coordinator(
        loop, host, bound.listener, secret, "bench", lambda text: print(text, file=sys.stderr)
    )

    def on_order(_words: list[str]) -> None:
        answer(**coordinator.statistics(), **memory())

    listen(loop, on_order)
    gc.disable()  # as bootrun does
    answer(port=coordinator.port, **memory())
    loop.run_forever()


def memory() -> dict[str, int]:
    """Resident memory of this process, now and at most."""
    sizes = {"VmRSS": 0, "VmHWM": 0}
    with open("/proc/self/status", encoding="ascii") as file:
        for line in file:
            name, _, rest = line.partition(":")
            if name in sizes:
                sizes[name] = int(rest.split()[0]) * 1024
    return {"rss": sizes["VmRSS"], "rss_most": sizes["VmHWM"]}


class Nodes:
    """Simulated nodes of one process; counts what they were told."""

    def __init__(self, loop: Loop, first: int, count: int, agents: int, port: int, secret: bytes | None) -> None:
        self._loop = loop
        self._numbers = range(first, first + count)
        self._agents = agents
        self._port = port
        self._secret = secret
        self._source = ""
        self._connections: dict[int, Connection] = {}
        self._began_s = 0.0
        self._worlds: dict[int, set[int]] = {}  # attempt: group ranks
        self._expected = count
        self._finished: dict[int, int] = {}  # exit status: nodes
        self._lost: list[str] = []
        self._retries = 0

    def on_order(self, words: list[str]) -> None:
        """join SOURCE | kill | end"""
        if words[0] == "join":
            self._source = words[1]
            self._began_s = time.monotonic()
            self._open(iter(self._numbers))
        elif words[0] == "kill":
            number = self._numbers[0]
            connection = self._connections.pop(number)
            self._expected -= 1
            # As when the node's process is killed with data unread: a reset.
            connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            answer(killed=time.monotonic())
            connection._drop()
        elif words[0] == "end":
            attempt = max(self._worlds)
            for connection in list(self._connections.values()):
                connection.send(Succeeded(attempt))

    def _open(self, rest: Any) -> None:
        for _ in range(BATCH):
            number = next(rest, None)
            if number is None:
                return
            self._connect(number)
        self._loop.call_later(PACE_S, self._open, rest)

    def _connect(self, number: int) -> None:
        join = Join(
            run_id=RUN_ID,
            host=f"node{number:05d}.cluster.example",
            address="",
            pid=os.getpid(),
            node_rank=-1,
            role="default",
            local_world_size=8,
            min_nodes=self._agents - 1,
            max_nodes=self._agents,
            max_restarts=3,
            master_port=40000,
            has_identity=True,
        )

        def opened(_local_address: str) -> None:
            connection = self._connections[number]
            connection.send(join)
            connection.send(Identity(DIGEST, ""))

        def ended(why: Ended) -> None:
            if why.reason == "connection refused" or why.reason.startswith("did not answer"):
                self._retries += 1
                self._loop.call_later(0.1, self._connect, number)
            else:
                self._lost.append(why.reason)
                answer(lost=self._lost[-1], count=len(self._lost))

        self._connections[number] = Connection(
            self._loop,
            Address(socket.AF_INET, "127.0.0.1"),
            self._port,
            self._secret,
            "bench",
            Callbacks(opened, lambda message: self._on_message(number, message), ended),
            Timing(first_ping_s=0.02 * max(1.0, self._agents / 64)),
            self._source,
        )

    def _on_message(self, number: int, message: FromCoordinator) -> None:
        if isinstance(message, Welcome):
            return
        if isinstance(message, World):
            worlds = self._worlds.setdefault(message.attempt, set())
            worlds.add(message.group_rank)
            self._connections[number].send(Started(message.attempt, 0.01))
            if len(worlds) == self._expected:
                answer(
                    attempt=message.attempt,
                    began=self._began_s,
                    last=time.monotonic(),
                    ranks=sorted(worlds),
                    size=message.group_world_size,
                    retries=self._retries,
                )
        elif isinstance(message, Stop):
            self._connections[number].send(Stopped(message.attempt, (), 40001, False))
        elif isinstance(message, Finish):
            self._finished[message.status] = self._finished.get(message.status, 0) + 1
            if sum(self._finished.values()) == self._expected:
                answer(finished=self._finished)
        elif isinstance(message, Refused):
            answer(lost=message.reason, count=1)


def run_nodes(first: int, count: int, agents: int, port: int, secret: bytes | None) -> None:
    """`count` nodes with numbers from `first`."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    loop = Loop()
    nodes = Nodes(loop, first, count, agents, port, secret)
    listen(loop, nodes.on_order)
    gc.disable()
    loop.run_forever()


def main(argv: list[str]) -> None:
    """See the module's docstring; the last argument is the secret, "-" for none (it protects nothing here)."""
    numbers = [int(word) for word in argv[1:-1]]
    secret = None if argv[-1] == "-" else argv[-1].encode()
    if argv[0] == "coordinator":
        run_coordinator(numbers[0], secret)
    else:
        run_nodes(numbers[0], numbers[1], numbers[2], numbers[3], secret)


if __name__ == "__main__":
    main(sys.argv[1:])
