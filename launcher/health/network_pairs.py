"""This node's part in a test of the network between nodes: a separate process listens and measures.

In: WantPairs and PairOrder of the coordinator. Out: PairPort and PairResult. It runs only between attempts, so the
job's traffic does not disturb it. Failures are reported to the coordinator, which continues without this node.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from bootseer.errors import LaunchError
from bootseer.health.pairs import MAX_ROUNDS
from bootseer.own_module import command_of
from bootseer.peers import derive_key
from launcher.base.helper_process import ServiceProcess
from launcher.base.listen_address import is_ip
from launcher.base.loop import EventLoop
from launcher.ranks.port import hold_any
from launcher.rendezvous.messages import PairMeasured, PairOrder, PairPort, PairResult, WantPairs

# The key of a job without a secret: any node that can join the job can also take part in the test.
_OPEN = b"bootseer: a job without a secret"
_MAX_ERROR_CHARACTERS = 100


class NodeNetworkTest:
    """This node's part in tests of the network between nodes."""

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
        ports that other nodes can reach; reached_at: returns the address under which others know this node."""
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
        """Start the process that listens; the nodes will measure soon."""
        self.close()
        self._number = message.number
        argv = command_of("bootseer.health.pair_node", self._listen_at)
        try:
            # The process listens on the port itself, at once: no other process is likely to have taken it.
            held = hold_any(self._port_range) if self._port_range is not None else None
            if held is not None:
                held.close()
            argv.append(str(held.port if held is not None else 0))
            self._process = ServiceProcess(self._loop, argv, self._environ, self._take, self._on_end)
        except (LaunchError, OSError):
            self._on_end("")

    def measure(self, order: PairOrder) -> None:
        """Start measuring with every other node; all of them listen."""
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
            found = tuple(_read(each) for each in measured[:MAX_ROUNDS])
            self._send(PairResult(self._number, tuple(each for each in found if each is not None)))

    def _on_end(self, _why: str) -> None:
        """Send empty results when the process has ended, so that the coordinator does not wait for this node."""
        self._process = None
        self._send(PairPort(self._number, "", 0))
        self._send(PairResult(self._number, ()))


def _read(value: object) -> PairMeasured | None:
    if not isinstance(value, dict) or not isinstance(partner := value.get("partner"), int):
        return None
    numbers = [value.get(name) for name in ("latency_s", "bytes_per_s", "lost_share")]
    if not all(number is None or (isinstance(number, int | float) and 0 <= number < 1e15) for number in numbers):
        return None
    return PairMeasured(partner, str(value.get("error", ""))[:_MAX_ERROR_CHARACTERS], *numbers)
