"""Nodes that measure with each other over loopback: real sockets, strangers among them, partners that are away."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from bootseer.health import pair_node, pair_probe
from bootseer.health.limits import Limits
from bootseer.health.pair_node import PairNode, PairOrder, listen, read_order
from bootseer.health.pairs import PairMeasurement, judge_pairs
from bootseer.own_module import command_of

KEY = bytes(range(32))

pytestmark = pytest.mark.leaks


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    made = [listen("127.0.0.1") for _ in range(4)]
    yield made
    for each in made:
        each.close()


def run(listeners: list[socket.socket], keys: dict[int, bytes] | None = None) -> dict[int, list[PairMeasurement]]:
    """Those of `keys` take part, each with its own."""
    keys = dict.fromkeys(range(len(listeners)), KEY) if keys is None else keys
    nodes = tuple(each.getsockname() for each in listeners)
    with ThreadPoolExecutor(len(listeners)) as pool:
        tests = {
            own: pool.submit(PairNode(listeners[own], PairOrder(key, own, nodes)).run) for own, key in keys.items()
        }
        return {own: test.result(20) for own, test in tests.items()}


def test_each_measures_each(listeners: list[socket.socket]) -> None:
    results = run(listeners)
    for own, found in results.items():
        assert sorted(each.partner for each in found) == [other for other in range(4) if other != own]
        for each in found:
            assert not each.error and each.bytes_per_s is not None and each.bytes_per_s > 1e6, each
            assert (each.latency_s is not None) == (own < each.partner)
            assert each.lost_share is not None and each.lost_share < 0.5
    findings, named = judge_pairs(results, ["a", "b", "c", "d"], Limits(pair_slow_share=0.001, pair_late_s=1.0))
    assert named == [] and "4 nodes, 6 links" in findings[0].what


def test_who_does_not_know_the_key_is_none_of_the_test(
    listeners: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_node, "ROUND_S", 0.4)
    results = run(listeners, {0: KEY, 1: KEY, 2: bytes(32), 3: KEY})
    assert all(each.error for each in results[2])
    assert {each.partner for own in (0, 1, 3) for each in results[own] if each.error} == {2}
    _, named = judge_pairs(
        {own: results[own] for own in (0, 1, 3)}, ["a", "b", "c", "d"], Limits(pair_slow_share=0.0)
    )
    assert named == [2]


def test_a_node_that_is_away_costs_each_round_its_time(
    listeners: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_node, "ROUND_S", 0.4)
    began_s = time.monotonic()
    results = run(listeners, {0: KEY, 1: KEY, 2: KEY})
    assert time.monotonic() - began_s < 3 * 0.4 + 3
    assert {each.partner for found in results.values() for each in found if each.error} == {3}


def test_strangers_do_not_stop_it(listeners: list[socket.socket]) -> None:
    silent = socket.create_connection(listeners[1].getsockname())
    noisy = socket.create_connection(listeners[1].getsockname())
    liar = socket.create_connection(listeners[1].getsockname())
    noisy.sendall(os.urandom(200))
    liar.sendall(pair_probe._HELLO.pack(pair_probe.MAGIC, 0, os.urandom(32)) + bytes(64))  # the number of another
    try:
        results = run(listeners[:2])
    finally:
        for each in (silent, noisy, liar):
            each.close()
    assert [each.error for each in results[0] + results[1]] == ["", ""]


def test_a_partner_that_takes_little_and_gives_nothing_costs_its_time_alone() -> None:
    with listen("127.0.0.1") as listener, ThreadPoolExecutor(1) as pool:
        address, port = listener.getsockname()
        end_s = time.monotonic() + 10

        def take_little() -> int:
            sock, _ = listener.accept()
            taken = 0
            with sock, suppress(ConnectionError):  # what it does not take is dropped in the end
                partner, nonce = pair_probe.receive_hello(sock, end_s)
                pair_probe.answer(sock, 1, partner, nonce, KEY, end_s)
                pair_probe._echo(sock, end_s)
                while data := sock.recv(1000):
                    taken += len(data)
                    time.sleep(0.001)
            return taken

        taking = pool.submit(take_little)
        sock = pair_probe.connect(address, port, 0, 1, KEY, end_s)
        began_s = time.monotonic()
        assert pair_probe.measure(sock, 1, True, end_s).bytes_per_s == 0.0
        assert time.monotonic() - began_s < 4 * pair_probe.SEND_S + pair_probe._PINGS_S
        assert 0 < taking.result(10) < pair_probe.MAX_BYTES


MIB = 1 << 20


@pytest.mark.parametrize(
    ("came", "received", "rate"),
    [
        # Windows of 1 MiB in 10 ms each, but for two in which the process did not run.
        (
            [(0.01 * place + 0.5 * (place > 3) + 0.5 * (place > 7), place * MIB) for place in range(12)],
            11 * MIB,
            100 * MIB,
        ),
        ([(0.0, 1000), (0.01, 1000 + MIB)], 1000 + 3 * MIB, 60 * MIB),  # few windows: all of it, until 0.05 s
        ([(0.02, 4000)], 4000, 40_000),  # in one piece: by the time that all took
        ([], 0, 0),
    ],
)
def test_a_rate_is_that_of_most_windows(came: list[tuple[float, int]], received: int, rate: float) -> None:
    assert pair_probe._rate(came, 0.05, received, 0.1) == pytest.approx(rate)


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[]",
        b'{"nodes": 3}',
        b'{"key": "00", "own": 0, "nodes": []}',
        b'{"key": "%s", "own": 2, "nodes": [["127.0.0.1", 7]]}' % (b"00" * 32),
        b'{"key": "%s", "own": 0, "nodes": [["localhost", 7]]}' % (b"00" * 32),
        b'{"key": "%s", "own": 0, "nodes": [["127.0.0.1", 0]]}' % (b"00" * 32),
        b'{"key": "zz", "own": 0, "nodes": [["127.0.0.1", 7]]}',
    ],
)
def test_orders_that_are_none(line: bytes) -> None:
    with pytest.raises((ValueError, TypeError)):
        read_order(line)


class Process:
    """The process of a node."""

    def __init__(self) -> None:
        argv = command_of("bootseer.health.pair_node", "127.0.0.1", "0")
        self.popen = subprocess.Popen(argv, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def line(self) -> dict:
        assert self.popen.stdout is not None
        assert select.select([self.popen.stdout], [], [], 20)[0]
        return json.loads(self.popen.stdout.readline())

    def ask(self, order: dict) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(json.dumps(order).encode() + b"\n")
        self.popen.stdin.flush()

    def close(self) -> int:
        self.popen.__exit__(None, None, None)
        return self.popen.returncode


def test_processes_measure_and_end() -> None:
    processes = [Process() for _ in range(3)]
    try:
        nodes = [["127.0.0.1", each.line()["port"]] for each in processes]
        processes[2].popen.send_signal(signal.SIGKILL)  # a node that is lost in between
        for own, each in enumerate(processes[:2]):
            each.ask({"key": KEY.hex(), "own": own, "nodes": nodes})
        for own, each in enumerate(processes[:2]):
            found = {one["partner"]: PairMeasurement(**one) for one in each.line()["measured"]}
            assert not found[1 - own].error and found[2].error
    finally:
        statuses = [each.close() for each in processes]
    assert statuses == [0, 0, -signal.SIGKILL]


def test_a_process_ends_when_nobody_asks() -> None:
    process = Process()
    process.line()
    assert process.close() == 0
