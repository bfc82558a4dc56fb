"""One node's answers about a standstill: stacks, and what ranks have left in files, whenever that comes."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launcher.base.loop import Loop
from launcher.monitor import node_watch
from launcher.monitor.collectives import flight_recorder as flight
from launcher.monitor.collectives.accelerators import DeviceUse, unpack_uses
from launcher.monitor.collectives.flight_recorder import DeviceSample, RankFiles
from launcher.monitor.node_watch import NodeWatch, write_hang_report
from launcher.ranks.group import RankGroup
from launcher.rendezvous.messages import HangReport, NodeStacks


class Collector:
    """Has the stacks when the test says so."""

    def __init__(self, *_: object) -> None:
        self.then: list[Callable[[dict[int, Any]], object]] = []

    def collect(self, then: Callable[[dict[int, Any]], object]) -> None:
        self.then.append(then)

    def close(self) -> None:
        self.then.clear()


class Reader:
    """Answers when the test says so."""

    asked: list[Callable[[RankFiles], object]]

    def __init__(self, _loop: object) -> None:
        self.is_busy = False

    def read(self, then: Callable[[RankFiles], object], *_: object) -> None:
        self.is_busy = True
        self.asked.append(lambda left: (setattr(self, "is_busy", False), then(left)))

    def close(self) -> None:
        self.is_busy = False


class Job:
    """A node's watch without ranks."""

    def __init__(self, loop: Loop, patch: pytest.MonkeyPatch) -> None:
        self.loop = loop
        self.asked: list[Callable[[RankFiles], object]] = []
        self.sent: list[NodeStacks] = []
        patch.setattr(node_watch, "StackCollector", Collector)
        patch.setattr(flight, "RankFilesReader", Reader)
        patch.setattr(Reader, "asked", self.asked, raising=False)
        world = SimpleNamespace(group_world_size=1, attempt=0)
        group = cast(RankGroup, SimpleNamespace(ranks=[], world=world))
        self.watch = NodeWatch(loop, group, lambda _: (0, 0), self._send, print)

    def _send(self, message: object) -> None:
        if isinstance(message, NodeStacks):
            self.sent.append(message)

    def stacks_come(self) -> None:
        collector = cast(Collector, self.watch._collector)
        collector.then.pop(0)({})


@pytest.fixture
def job(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(loop, monkeypatch)


@pytest.mark.parametrize("files_first", [True, False])
def test_an_answer_has_stacks_and_files_and_the_next_ones_the_same_files(job: Job, files_first: bool) -> None:
    job.watch.ask(0)
    steps = [job.stacks_come, lambda: job.asked[0](RankFiles(b"calls", "tp=2"))]
    for step in reversed(steps) if files_first else steps:
        assert job.sent == []
        step()
    job.watch.ask(1)
    job.stacks_come()
    assert [(each.number, each.traces, each.layout) for each in job.sent] == [
        (0, b"calls", "tp=2"),
        (1, b"calls", "tp=2"),
    ]
    assert len(job.asked) == 1, "one reading of files for one standstill"
    job.watch.stop()


def test_stacks_wait_for_files_only_for_a_moment(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_watch, "FILES_S", 0.05)
    job.watch.ask(0)
    job.stacks_come()
    assert job.sent == []
    end_s = job.loop.time() + 10.0
    while not job.sent:
        assert job.loop.time() < end_s
        job.loop.run_once(0.1)
    assert (job.sent[0].number, job.sent[0].traces, job.sent[0].layout) == (0, b"", "")
    job.asked[0](RankFiles(b"calls"))
    assert len(job.sent) == 1, "it came too late for this one"
    monkeypatch.setattr(node_watch, "SAME_S", 0.0)
    job.watch.ask(1)
    assert len(job.asked) == 2, "another standstill"
    job.watch.stop()
    assert len(job.sent) == 1


class Driver(Reader):
    """Of devices."""


def test_devices_are_reported_with_the_ranks_that_are_on_them(
    job: Job, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    driver: list[Callable[[Any], object]] = []
    monkeypatch.setattr(Driver, "asked", driver, raising=False)
    monkeypatch.setattr(flight, "DeviceReader", Driver)
    monkeypatch.setattr(node_watch, "DRIVER", str(tmp_path))
    job.watch._group.ranks.extend(cast(Any, [SimpleNamespace(rank=4 + place, pid=70 + place) for place in (0, 1)]))
    job.watch._read_at_s, job.watch._reader = job.loop.time(), cast(Any, Reader(job.loop))
    uses = [DeviceUse(number, 100, 0, 123.0, ()) for number in range(3)]
    seen = tuple(DeviceSample(use, pids) for use, pids in zip(uses, ((71, 70, 9), (), (72,)), strict=True))
    job.watch.ask(0)
    job.stacks_come()
    assert job.sent == [], "they are waited for"
    driver[0](seen)
    assert unpack_uses(job.sent[0].devices, (4, 5)) == [uses[0]._replace(ranks=(4, 5))]
    job.watch._group.ranks.clear()
    job.watch.ask(1)
    job.stacks_come()
    assert unpack_uses(job.sent[1].devices, (4, 5)) == uses, "as from within a container"
    assert len(driver) == 1, "once for questions that belong together"
    monkeypatch.setattr(node_watch, "DEVICE_SAMPLE_VALID_S", 0.0)
    job.watch.ask(2)
    assert len(driver) == 2
    job.stacks_come()
    driver[1](())
    assert job.sent[2].devices == "", "what was so before is not told again"
    job.watch.stop()


def test_a_report_is_whole_or_not_there(tmp_path: Path) -> None:
    """Who sees the file may read it: it comes by a rename, and what cannot be written leaves nothing."""
    older = [tmp_path / "standstill-3.json", tmp_path / "standstill-3.txt"]
    for path in older:
        path.write_text("of an earlier one")
    with older[0].open() as json_before, older[1].open() as text_before:
        kept = write_hang_report(str(tmp_path), HangReport(0, 3, "line\nline\n", zlib.compress(b"{}")))
        assert {json_before.read(), text_before.read()} == {"of an earlier one"}, "a reader keeps it"
    assert kept == str(older[1])
    assert [path.read_text() for path in older] == ["{}\n", "line\nline\n"]
    (tmp_path / "standstill-4.txt").mkdir()
    with pytest.raises(IsADirectoryError):
        write_hang_report(str(tmp_path), HangReport(0, 4, "line\n", zlib.compress(b"{}")))
    with pytest.raises(OSError, match="cannot be unpacked"):
        write_hang_report(str(tmp_path), HangReport(0, 5, "line\n", b"no zlib"))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "standstill-3.json",
        "standstill-3.txt",
        "standstill-4.json",
        "standstill-4.txt",
    ]
