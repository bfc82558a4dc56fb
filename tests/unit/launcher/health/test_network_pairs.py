"""A node's part in a test of the network: what its process says is checked, and its failure is told."""

from __future__ import annotations

import time

import pytest

from launcher.base.loop import Loop
from launcher.health.network_pairs import NodeNetworkTest
from launcher.rendezvous.messages import PairMeasured, PairOrder, PairPort, PairResult, WantPairs
from tests.support import find_free_port


class Reported:
    """A NodeNetworkTest without a process."""

    def __init__(self, reached_at: str = "10.0.0.1") -> None:
        self.sent: list[PairPort | PairResult] = []
        self.pairs = NodeNetworkTest(Loop(), "job", b"s" * 16, (), "", None, lambda: reached_at, self.sent.append)
        self.pairs._number = 4


def test_where_it_listens() -> None:
    told = Reported()
    told.pairs._take({"port": 7})
    assert told.sent == [PairPort(4, "10.0.0.1", 7)]
    for port in (0, -1, 65536, "7", None, 7.5, True):
        told.pairs._take({"port": port})
    assert len(told.sent) == 1
    unknown = Reported("somewhere")
    unknown.pairs._take({"port": 7})
    assert unknown.sent == [PairPort(4, "somewhere", 0)]


@pytest.mark.parametrize(
    "nonsense",
    [
        3,
        {},
        {"partner": "1"},
        {"partner": 1, "latency_s": "x"},
        {"partner": 1, "bytes_per_s": -1.0},
        {"partner": 1, "lost_share": float("nan")},
    ],
)
def test_measurements_are_checked(nonsense: object) -> None:
    told = Reported()
    good = {"partner": 1, "error": "e" * 500, "latency_s": 0.1, "bytes_per_s": 5, "lost_share": None}
    told.pairs._take({"measured": [good, nonsense]})
    assert told.sent == [PairResult(4, (PairMeasured(1, "e" * 100, 0.1, 5, None),))]


def test_it_listens_where_others_can_reach_it() -> None:
    loop = Loop()
    port = find_free_port()
    sent: list[PairPort | PairResult] = []
    pairs = NodeNetworkTest(loop, "job", None, (), "127.0.0.1", (port, port), lambda: "127.0.0.1", sent.append)
    pairs.begin(WantPairs(0))
    end_s = time.monotonic() + 20
    while not sent and time.monotonic() < end_s:
        loop.run_once(0.05)
    pairs.close()
    loop.close()
    assert sent == [PairPort(0, "127.0.0.1", port)]


def test_a_process_that_ends_is_reported() -> None:
    told = Reported()
    told.pairs._on_end("it was killed")
    assert told.sent == [PairPort(4, "", 0), PairResult(4, ())]


def test_a_process_that_cannot_be_started_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    told = Reported()
    told.pairs.begin(WantPairs(5))
    told.pairs.measure(PairOrder(5, 0, ()))
    assert told.sent == [PairPort(5, "", 0), PairResult(5, ())]
