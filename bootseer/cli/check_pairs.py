"""`bootseer check --pair`: measure the network from this node to others by hand; those run --pair-listen.

Both need the same secret as a job (BOOTSEER_SECRET_FILE). A job measures each node with each other before a
restart; this command measures this node with the others, one after the other.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from bootseer.errors import UsageError
from bootseer.health import pair_probe
from bootseer.health.finding import FAIL, OK, Finding, format_value, one_line
from bootseer.health.limits import Limits
from bootseer.health.pair_node import describe, listen
from bootseer.health.pairs import CHECK, PairMeasurement, judge_pairs
from bootseer.peers import derive_key
from bootseer.secret import FILE_VARIABLE, VARIABLE, find_secret

PORT = 29517
_MAX_REFUSED_LOGGED = 8


def read_targets(texts: list[str]) -> list[tuple[str, int]]:
    """Parse HOST, HOST:PORT, [ADDRESS]:PORT. Raises: UsageError."""
    found = []
    for text in texts:
        host, colon, port = text.rpartition(":")
        if not colon or (":" in host and not host.endswith("]")):
            host, port = text, str(PORT)
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UsageError(f"--pair {text!r}: give HOST or HOST:PORT of a node with --pair-listen PORT")
        found.append((host.strip("[]"), int(port)))
    return found


def measure(texts: list[str], timeout_s: float, limits: Limits) -> list[Finding]:
    """Return a finding for each of the other nodes. Raises: UsageError, ConfigError."""
    key, targets = _key(), read_targets(texts)
    results = [_measure(number, *target, key, timeout_s) for number, target in enumerate(targets, 1)]
    judged = [found for found in judge_pairs({0: results}, ["here", *texts], limits)[0] if found.level != OK]
    return [_describe(texts[each.partner - 1], each, judged) for each in results]


def _describe(name: str, each: PairMeasurement, judged: list[Finding]) -> Finding:
    if each.error:
        way_out = "check that it listens (bootseer check --pair-listen), and the network between"
        return Finding(CHECK, FAIL, f"nothing goes through: {each.error}", name, way_out=way_out)
    return next((found for found in judged if name in found.where.split(" to ")), _in_order(name, each))


def _measure(number: int, host: str, port: int, key: bytes, timeout_s: float) -> PairMeasurement:
    end_s = time.monotonic() + timeout_s
    try:
        sock = pair_probe.connect(host, port, 0, 1, key, end_s)
        return pair_probe.measure(sock, number, True, end_s)
    except (OSError, pair_probe.NotProvenError) as error:
        return PairMeasurement(number, describe(error))


def _in_order(name: str, found: PairMeasurement) -> Finding:
    words = [f"{format_value(found.bytes_per_s or 0.0, 'bytes')}/s from it"]
    words.append(f"{1e3 * (found.latency_s or 0.0):.2g} ms round trip")
    if found.lost_share is not None:
        words.append(f"{100 * found.lost_share:.2g} % of segments retransmitted")
    return Finding(CHECK, OK, ", ".join(words), name)


def serve(port: int, say: Callable[[str], object]) -> None:
    """Let other nodes measure, one at a time, until interrupted. Raises: UsageError, ConfigError."""
    key = _key()
    try:
        listener = listen("", port)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"--pair-listen {port}: {getattr(error, 'strerror', None) or error}; give another port"
        ) from None
    refused = 0
    with listener:
        here = f"{os.uname().nodename}:{listener.getsockname()[1]}"
        say(f"waiting for other nodes: run there: bootseer check --pair {here}")
        while True:
            listener.settimeout(None)
            sock, address = listener.accept()
            host = one_line(str(address[0]).removeprefix("::ffff:"))
            try:
                say(_in_order(host, _answer(sock, key)).line())
            except (OSError, pair_probe.NotProvenError) as error:
                sock.close()
                refused += 1
                if refused <= _MAX_REFUSED_LOGGED:
                    say(f"connection from {host} refused: {describe(error)}")


def _answer(sock: socket.socket, key: bytes) -> PairMeasurement:
    end_s = time.monotonic() + 5.0
    number, nonce = pair_probe.receive_hello(sock, time.monotonic() + 1.0)
    if number:
        raise pair_probe.NotProvenError("it belongs to another test")
    pair_probe.answer(sock, 1, 0, nonce, key, end_s)
    return pair_probe.measure(sock, 0, False, end_s)


def _key() -> bytes:
    secret = find_secret(os.environ)
    if secret is None:
        raise UsageError(f"--pair needs the same secret on all these nodes: set {FILE_VARIABLE} (or {VARIABLE})")
    return derive_key(secret, "pairs by hand")
