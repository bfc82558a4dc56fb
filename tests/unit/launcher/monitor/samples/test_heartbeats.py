"""Heartbeats on their way from pages into event files: real pages and files, a loop whose time is the test's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from bootseer.events import BEAT_MARK, read_events
from launcher.in_rank import bootstrap as inside
from launcher.monitor.samples.heartbeats import LOOK_S, HeartbeatCopier
from launcher.ranks.stats_page import StatsPages
from launcher.rules.node_rules import describe_beat
from tests.unit.launcher.fake_loop import FakeLoop


class Rank(NamedTuple):
    rank: int
    page_file: str
    events_file: str


class Node:
    """Two ranks, each with a page and with a file that the rank has made."""

    def __init__(self, folder: Path) -> None:
        self.pages = StatsPages()
        files = self.pages.renew(2, False)
        self.ranks = [Rank(place, file.path, f"{folder}/{place}.jsonl") for place, file in enumerate(files)]
        for rank in self.ranks:
            Path(rank.events_file).touch()
        self.loop = FakeLoop()

    def begin(self) -> HeartbeatCopier:
        return HeartbeatCopier(self.loop, self.ranks, "run", "node-a", 2)

    def note(self, rank: int, number: int, fields: str, at_ns: int = 5) -> None:
        """The rank's newest note is this one."""
        data = inside.pack_text(number, at_ns, fields)
        os.pwrite(self.pages._fds[rank], data, inside.LOST_AT - len(data))

    def values(self, rank: int) -> list[float | None]:
        return [event.value for event in read_events(self.ranks[rank].events_file)]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    found = Node(tmp_path)
    yield found
    found.pages.close()


def test_each_comes_once_and_as_the_rank_would_write_it(node: Node) -> None:
    at_ns = time.monotonic_ns()
    node.note(0, 1, ',"value":7,"attrs":{"loss":"nan","lr":0.5}', at_ns)
    heartbeats = node.begin()
    for _ in range(3):
        node.loop.advance(LOOK_S)
    node.note(0, 2, ',"value":8')
    node.note(1, 1, ',"value":9')
    assert (node.values(0), node.values(1)) == ([7], [])
    node.loop.advance(LOOK_S)
    assert (node.values(0), node.values(1)) == ([7, 8], [9])
    event = next(iter(read_events(node.ranks[0].events_file)))
    assert (event.run_id, event.node, event.rank, event.attempt) == ("run", "node-a", 0, 2)
    assert (event.mono_ns, event.stage, event.attrs) == (at_ns, None, {"loss": "nan", "lr": 0.5})
    assert abs(event.wall_ns - time.time_ns()) < 60 * 10**9
    line = Path(node.ranks[0].events_file).read_bytes().splitlines()[0]
    assert BEAT_MARK in line and describe_beat(line) == "heartbeat step=7 loss=nan lr=0.5"
    heartbeats.stop()
    assert node.loop.planned == []


def test_the_last_ones_of_a_rank_come_at_its_end(node: Node) -> None:
    heartbeats = node.begin()
    node.note(0, 1, ',"value":1')
    node.note(1, 1, ',"value":2')
    heartbeats.rank_ended(0)
    assert (node.values(0), node.values(1)) == ([1], [])
    node.note(0, 2, ',"value":3')
    heartbeats.stop()
    heartbeats.rank_ended(1)
    assert (node.values(0), node.values(1)) == ([1], [2])


def test_a_time_from_the_future_is_none(node: Node) -> None:
    node.note(0, 1, ',"value":1', 2**64 - 1)
    node.begin().stop()
    (event,) = read_events(node.ranks[0].events_file)
    assert event.mono_ns <= time.monotonic_ns()


@pytest.mark.parametrize(
    "fields", ['"', ',"value":', ',"attrs":[1]', ',"attrs":' + "[" * 300, "}", ',"value":1}\n{"value":2', ""]
)
def test_what_is_no_heartbeat_is_left_out_and_the_next_one_is_not(node: Node, fields: str) -> None:
    heartbeats = node.begin()
    node.note(0, 1, fields)
    heartbeats.bring()
    node.note(0, 2, ',"value":5')
    heartbeats.stop()
    lines = Path(node.ranks[0].events_file).read_text().splitlines()
    assert node.values(0)[-1] == 5 and len(lines) <= 2
    assert all('"name":"heartbeat"' in line for line in lines)


@pytest.mark.parametrize("what", ["nothing", "link", "fifo", "folder"])
def test_a_file_that_is_not_the_ranks_is_left_alone(node: Node, tmp_path: Path, what: str) -> None:
    """A rank may run as somebody who could not write there, and the agent could."""
    path, own = Path(node.ranks[0].events_file), tmp_path / "own"
    path.unlink()
    own.touch()
    if what == "link":
        path.symlink_to(own)
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    node.note(0, 1, ',"value":1')
    node.note(1, 1, ',"value":2')
    node.begin().stop()
    assert own.read_bytes() == b"" and (what != "nothing" or not path.exists())
    assert node.values(1) == [2]


def test_pages_that_are_gone(node: Node) -> None:
    node.pages.close()
    heartbeats = node.begin()
    assert node.loop.planned == []
    heartbeats.rank_ended(0)
    heartbeats.stop()
