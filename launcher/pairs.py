"""This node's part in a test of the network between nodes: a process of its own listens and measures.

In: WantPairs and PairOrder of the coordinator. Out: PairPort and PairResult. Between attempts alone, so nothing of
the job's traffic is in its way; what fails is told to the coordinator, which goes on without this node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from bootseer.errors import LaunchError
from bootseer.health.pairs import MOST_ROUNDS
from bootseer.own_module import command_of
from bootseer.peers import derive_key
from launcher.loop import EventLoop
from launcher.ranks.port import hold_any
from launcher.rendezvous.messages import PairMeasured, PairOrder, PairPort, PairResult, WantPairs
from launcher.rendezvous.serving import is_ip
from launcher.service import ServiceProcess

# Of a job without a secret: who can join it can take part in this, too.
_OPEN = b"bootseer: a job without a secret"
_MOST_ERROR_CHARACTERS = 100


class NodePairs:
    """See the module's docstring."""

    def __init__(
        self,
        loop: EventLoop,
        run_id: str,
        secret: bytes | None,
        unset: tuple[str, ...],
        listen_at: str,
        port_range: tuple[int, int] | None,
        reached_at: Callable[[], str],
        send: Callable[[PairPort | PairResult], object],
    ) -> None:
        """Args: unset: variables that the process does not get; listen_at: an IP address, "" for all; port_range:
        that other nodes can reach; reached_at: the address that others know this node by."""
        self._loop = loop
        self._run_id = run_id
        self._secret = secret if secret is not None else _OPEN
        self._environ = {name: value for name, value in os.environ.items() if name not in unset}
        self._listen_at = listen_at
        self._port_range = port_range
        self._reached_at = reached_at
        self._send = send
        self._process: ServiceProcess | None = None
        self._number = -1  # of the test

    def begin(self, message: WantPairs) -> None:
        """Others are about to measure."""
        self.close()
        self._number = message.number
        argv = command_of("bootseer.health.pair_node", self._listen_at)
        try:
            # It listens there itself, at once: nobody else has had the port of late.
            held = hold_any(self._port_range) if self._port_range is not None else None
            if held is not None:
                held.close()
            argv.append(str(held.port if held is not None else 0))
            self._process = ServiceProcess(self._loop, argv, self._environ, self._take, self._on_end)
        except (LaunchError, OSError):
            self._on_end("")

    def measure(self, order: PairOrder) -> None:
        """All listen: each measures with each."""
        if self._process is not None and order.number == self._number:
            key = derive_key(self._secret, f"pairs {order.number} of {self._run_id}").hex()
            nodes = [[node.address, node.port] for node in order.nodes]
            self._process.ask("measure", key=key, own=order.own, nodes=nodes)

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()

    def _take(self, answer: dict[str, Any]) -> None:
        port, measured = answer.get("port"), answer.get("measured")
        if type(port) is int and 0 < port < 65536:
            address = self._reached_at()
            self._send(PairPort(self._number, address, port if is_ip(address) else 0))
        elif isinstance(measured, list):
            found = tuple(_read(each) for each in measured[:MOST_ROUNDS])
            self._send(PairResult(self._number, tuple(each for each in found if each is not None)))

    def _on_end(self, _why: str) -> None:
        """After it has said all, or before: who has measured nothing is not waited for."""
        self._process = None
        self._send(PairPort(self._number, "", 0))
        self._send(PairResult(self._number, ()))


def _read(value: object) -> PairMeasured | None:
    if not isinstance(value, dict) or not isinstance(partner := value.get("partner"), int):
        return None
    numbers = [value.get(name) for name in ("latency_s", "bytes_per_s", "lost_share")]
    if not all(number is None or (isinstance(number, int | float) and 0 <= number < 1e15) for number in numbers):
        return None
    return PairMeasured(partner, str(value.get("error", ""))[:_MOST_ERROR_CHARACTERS], *numbers)
