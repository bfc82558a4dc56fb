"""The process of a node that measures the network to each other node of a job.

    python -P -m bootseer.health.pair_node ADDRESS PORT      ("" and 0 for any)

Out, as JSON lines: {"port": N} as soon as it listens, {"measured": [...]} when it is done. In: one line with the
key of the test in hexadecimal, the nodes in order as [address, port], and the index of this node. It ends after
that, at the end of standard input, or without a request for LONGEST_S.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from ipaddress import ip_address
from typing import NamedTuple

from bootseer.health import pair_probe
from bootseer.health.finding import one_line
from bootseer.health.pairs import PairMeasurement, count_rounds, find_partner
from bootseer.ipc.framing import InvalidMessageError, LineBuffer, encode
from bootseer.linux.processes import set_death_signal

ROUND_S = 1.0  # limit; a round ends earlier once its pairs are done
HELLO_S = 0.2  # for a connected node to send its number
LONGEST_S = 60.0
MAX_NODES = 4096
MAX_LINE_BYTES = 1 << 20
MAX_EARLY = 16  # waiting partners of later rounds
MAX_ERROR_CHARACTERS = 100


class PairOrder(NamedTuple):
    """The order of a test; `nodes`: address and port of each."""

    key: bytes
    own: int
    nodes: tuple[tuple[str, int], ...]


def read_order(line: bytes) -> PairOrder:
    """Parse an order. Raises: ValueError."""
    value = json.loads(line)
    if not isinstance(value, dict) or not isinstance(value.get("nodes"), list):
        raise ValueError("invalid order")
    key, own = bytes.fromhex(str(value.get("key"))), value.get("own")
    nodes = []
    for each in value["nodes"][: MAX_NODES + 1]:
        address, port = each
        if not isinstance(port, int) or not 0 < port < 65536:
            raise ValueError("invalid port")
        nodes.append((str(ip_address(address)), port))
    if len(nodes) > MAX_NODES or not isinstance(own, int) or not 0 <= own < len(nodes) or len(key) < 16:
        raise ValueError("invalid order")
    return PairOrder(key, own, tuple(nodes))


def listen(address: str, port: int = 0) -> socket.socket:
    """Return a listening socket. Raises: OSError."""
    if not address and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=64, dualstack_ipv6=True)
    return socket.create_server((address, port), family=socket.AF_INET6 if ":" in address else socket.AF_INET)


class PairNode:
    """One node's part in a test."""

    def __init__(self, listener: socket.socket, order: PairOrder) -> None:
        self._listener = listener
        self._order = order
        self._early: dict[int, tuple[socket.socket, bytes]] = {}  # nodes that are in a later round than this one

    def run(self) -> list[PairMeasurement]:
        """Run all rounds; each ends in time, also if its partner fails."""
        nodes, own = self._order.nodes, self._order.own
        began_s = time.monotonic()
        found = []
        try:
            for turn in range(count_rounds(len(nodes))):
                partner = find_partner(len(nodes), own, turn)
                if partner is not None:
                    found.append(self._measure(partner, began_s + (turn + 1) * ROUND_S))
        finally:
            for sock, _ in self._early.values():
                sock.close()
        return found

    def _measure(self, partner: int, end_s: float) -> PairMeasurement:
        try:
            if self._order.own < partner:
                address, port = self._order.nodes[partner]
                sock = pair_probe.connect(address, port, self._order.own, partner, self._order.key, end_s)
            else:
                sock = self._await(partner, end_s)
            return pair_probe.measure(sock, partner, self._order.own < partner, end_s)
        except (OSError, pair_probe.NotProvenError) as error:
            return PairMeasurement(partner, describe(error))

    def _await(self, partner: int, end_s: float) -> socket.socket:
        """Return the connection of a partner; other nodes that connect wait for their round."""
        while True:
            sock, nonce = self._early.pop(partner) if partner in self._early else self._accept(partner, end_s)
            try:
                pair_probe.answer(sock, self._order.own, partner, nonce, self._order.key, end_s)
            except pair_probe.NotProvenError:
                sock.close()  # another process has used its number
                continue
            except BaseException:
                sock.close()
                raise
            return sock

    def _accept(self, partner: int, end_s: float) -> tuple[socket.socket, bytes]:
        while True:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError("it did not connect in time")
            self._listener.settimeout(left_s)
            sock, _ = self._listener.accept()
            try:
                number, nonce = pair_probe.receive_hello(sock, min(end_s, time.monotonic() + HELLO_S))
            except (OSError, pair_probe.NotProvenError):
                sock.close()
                continue
            if number == partner:
                return sock, nonce
            if number in self._early or number >= len(self._order.nodes) or len(self._early) >= MAX_EARLY:
                sock.close()
            else:
                self._early[number] = sock, nonce


def describe(error: Exception) -> str:
    """Return the reason why nothing was measured, in a few words."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return one_line(str(text))[:MAX_ERROR_CHARACTERS]


def main(argv: Sequence[str]) -> int:
    set_death_signal(signal.SIGKILL)
    address, port = argv
    with listen(address, int(port)) as listener:
        _write_line({"port": listener.getsockname()[1]})
        line = _read_line()
        if line is None:
            return 0
        try:
            order = read_order(line)
        except (ValueError, TypeError, RecursionError) as error:
            print(f"bootseer pairs: {one_line(str(error))}", file=sys.stderr)
            return 2
        _write_line({"measured": [each._asdict() for each in PairNode(listener, order).run()]})
    return 0


def _read_line() -> bytes | None:
    """Return the request line; None at the end of input or after LONGEST_S."""
    received = LineBuffer(MAX_LINE_BYTES)
    lines: list[bytes] = []
    end_s = time.monotonic() + LONGEST_S
    while not lines:
        if not select.select([0], [], [], max(0.0, end_s - time.monotonic()))[0]:
            return None
        piece = os.read(0, 65536)
        if not piece:
            return None
        try:
            lines = received.feed(piece)
        except InvalidMessageError:
            return None
    return lines[0]


def _write_line(what: object) -> None:
    with open(1, "wb", closefd=False) as out:
        out.write(encode(what))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
