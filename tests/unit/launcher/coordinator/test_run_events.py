"""The run file: what nodes send is vetted, bounded and counted, and a disk in trouble holds nobody up."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer.events import EVENTS_DROPPED, Event, read_events
from launcher.coordinator.run_events import RunEvents, RunLimits
from launcher.coordinator.run_file import FileLimits, NodeEvents, RunFile
from launcher.rendezvous.event_batch import pack
from launcher.rendezvous.messages import EventBatch, EventsDropped
from tests.support import wait_until

pytestmark = pytest.mark.leaks
ROOT = Path(__file__).parents[4]
NOTHING = EventsDropped(0, 0, 0, 0)


def line(name: str = "x", **fields: Any) -> bytes:
    event = {
        "v": 1, "wall_ns": 1, "mono_ns": 1000, "run_id": "job", "node": "anyone", "rank": 0, "attempt": 0,
        "stage": "spawn", "kind": "instant", "name": name,
    }  # fmt: skip
    return json.dumps({**event, **fields}).encode()


def batch(*lines: bytes, dropped: EventsDropped = NOTHING, **fields: Any) -> EventBatch:
    packed = pack(lines)
    assert packed.lines == len(lines)
    return EventBatch(*packed, 1000, 2000, 10, dropped)._replace(**fields)


@pytest.fixture
def path(tmp_path: Path) -> str:
    return os.fspath(tmp_path / "run.jsonl")


@pytest.fixture
def events(path: str) -> Iterator[RunEvents]:
    events = RunEvents(RunFile(path, "job"))
    yield events
    events.close(5.0)


def written(path: str) -> list[Event]:
    return [event for event in read_events(path) if event.name != EVENTS_DROPPED]


def told(path: str) -> dict[str, Event]:
    """What was told last of each node's missing lines."""
    return {event.node: event for event in read_events(path) if event.name == EVENTS_DROPPED}


class TestWhatIsWritten:
    def test_lines_of_all_nodes(self, events: RunEvents, path: str) -> None:
        events.joined(0, "a")
        events.joined(7, "b")
        events.receive(0, batch(line("one"), line("two")))
        events.receive(7, batch(line("three", mono_ns=900), error_ns=0))
        assert events.close() == ""
        assert [(event.node, event.name, event.job_ns, event.job_error_ns) for event in read_events(path)] == [
            ("a", "one", 2000, 11),
            ("a", "two", 2000, 11),
            ("b", "three", 1900, 0),
        ]

    def test_nobody_knows_who_sent_it(self, events: RunEvents, path: str) -> None:
        events.receive(3, batch(line()))
        events.joined(3, "a")
        events.left(3)
        events.receive(3, batch(line()))
        assert events.close() == ""
        assert not os.path.exists(path)

    def test_hostile_lines_are_left_out_and_counted(self, events: RunEvents, path: str) -> None:
        events.joined(0, "a")
        bad = [line(run_id="other"), b"junk", b'{"v":1}', line(rank="0"), b""]
        events.receive(0, batch(line("good", node="b"), *bad))
        events.close()
        assert [(event.node, event.name) for event in written(path)] == [("a", "good")]
        reported_of = told(path)["a"]
        assert (reported_of.value, reported_of.attrs, reported_of.stage, reported_of.kind) == (
            5,
            {"bad": 5},
            None,
            "scalar",
        )
        assert reported_of.job_ns == reported_of.mono_ns and reported_of.job_error_ns == 0

    def test_batches_that_are_not_what_they_say(self, events: RunEvents, path: str) -> None:
        events.joined(0, "a")
        bomb = zlib.compress(bytes(50 << 20), 9)
        assert len(bomb) <= 64 * 1024
        events.receive(0, batch(line()))
        events.receive(0, batch()._replace(data=bomb, raw_bytes=1 << 20, lines=1))
        events.receive(0, batch(line(), line())._replace(lines=7))
        events.receive(0, batch(line("after")))
        events.close()
        assert [event.name for event in written(path)] == ["x", "after"]
        assert told(path)["a"].attrs == {"bad": 8}

    def test_a_clock_from_the_future_is_none(self, events: RunEvents, path: str) -> None:
        events.joined(0, "a")
        events.receive(0, batch(line(), job_ns=time.monotonic_ns() + 10**12))
        events.close()
        assert [event.job_ns for event in written(path)] == [None]

    def test_what_the_node_left_out_is_reported_with_its_reasons(self, events: RunEvents, path: str) -> None:
        events.joined(0, "a")
        events.receive(0, batch(line(), dropped=EventsDropped(5, 0, 2, 1)))
        events.close()
        assert (told(path)["a"].value, told(path)["a"].attrs) == (8, {"rate": 5, "unread": 2, "torn": 1})

    def test_it_is_reported_when_a_node_leaves(self, events: RunEvents, path: str) -> None:
        events.joined(0, "a")
        events.receive(0, batch(b"junk"))
        events.receive(0, batch(b"junk"))
        events.left(0)
        wait_until(lambda: told(path).get("a") and told(path)["a"].value == 2, 5.0)
        assert events.statistics()["events_dropped"] == 2

    def test_a_file_of_an_older_run_is_gone_on_with(self, path: str) -> None:
        Path(path).write_bytes(line("older") + b"\n" + line()[:30])
        events = RunEvents(RunFile(path, "job"))
        events.joined(0, "a")
        events.receive(0, batch(line("newer")))
        events.close()
        assert [event.name for event in read_events(path)] == ["older", "newer"]

    def test_without_a_batch_there_is_no_file_and_no_thread(self, events: RunEvents, path: str) -> None:
        events.joined(0, "a")
        assert events.close() == ""
        assert events._thread is None and not os.path.exists(path)


class TestBounds:
    def test_a_node_that_sends_too_much_is_not_received(self, path: str) -> None:
        events = RunEvents(RunFile(path, "job"), RunLimits(node_burst_bytes=10_000, node_bytes_s=1))
        events.joined(0, "a")
        events.joined(1, "b")
        for _ in range(200):
            events.receive(0, batch(*[line()] * 10))
        events.receive(1, batch(line("of b")))
        events.close()
        found = written(path)
        assert [event.name for event in found if event.node == "b"] == ["of b"]
        kept = sum(event.node == "a" for event in found)
        assert 0 < kept < 100
        assert told(path)["a"].attrs == {"busy": 2000 - kept}
        assert "b" not in told(path)

    def test_short_lines_cost_as_well(self, path: str) -> None:
        events = RunEvents(RunFile(path, "job"), RunLimits(node_burst_bytes=100_000, node_bytes_s=1))
        events.joined(0, "a")
        for _ in range(10):
            events.receive(0, batch(*[b"{"] * 1000))
        events.close()
        assert told(path)["a"].attrs == {"bad": 1000, "busy": 9000}

    def test_the_file_has_a_bound_and_heartbeats_a_smaller_one(self, path: str) -> None:
        limits = FileLimits(file_bytes=20_000, beats_bytes=5000, tell_s=0)
        events = RunEvents(RunFile(path, "job", limits))
        events.joined(0, "a")
        for _ in range(20):
            events.receive(0, batch(*[line("beat", stage=None, kind="scalar", value=1)] * 10))
        for _ in range(20):
            events.receive(0, batch(*[line("start")] * 10))
        events.close()
        names = [event.name for event in written(path)]
        assert 0 < names.count("beat") < 40
        assert 50 < names.count("start") < 100
        assert 15_000 < os.path.getsize(path) < 21_000
        assert told(path)["a"].value == 400 - len(names)
        assert set(told(path)["a"].attrs) == {"full"}

    def test_it_is_reported_of_now_and_then_only(self, path: str) -> None:
        events = RunEvents(RunFile(path, "job", FileLimits(tell_s=3600.0)))
        events.joined(0, "a")
        for _ in range(50):
            events.receive(0, batch(line(), b"junk"))
        events.close()
        values = [event.value for event in read_events(path) if event.name == EVENTS_DROPPED]
        assert values == [1, 50]


class TestDisk:
    def test_a_disk_that_hangs_holds_nobody_up(self, path: str) -> None:
        os.mkfifo(path)  # to open it waits for a reader
        events = RunEvents(RunFile(path, "job"), RunLimits(queued_bytes=100_000))
        events.joined(0, "a")
        began_s = time.monotonic()
        for _ in range(2000):
            events.receive(0, batch(line()))
        assert time.monotonic() - began_s < 2.0
        assert events.queued_bytes <= 100_000
        assert events.statistics()["events_dropped"] > 1000
        began_s = time.monotonic()
        assert "the disk accepted no data for 0.2 s" in events.close(0.2)
        assert 0.15 < time.monotonic() - began_s < 1.0
        # With a reader it goes on, and the thread ends.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert events._thread is not None
            end_s = time.monotonic() + 5.0
            while events._thread.is_alive() and time.monotonic() < end_s:
                try:
                    os.read(fd, 65536)
                except BlockingIOError:
                    pass
                events._thread.join(0.01)
            assert not events._thread.is_alive()
        finally:
            os.close(fd)

    @pytest.mark.parametrize(
        ("where", "why"), [("/dev/full", "No space left"), ("/nowhere/run.jsonl", "No such file")]
    )
    def test_what_cannot_be_written_is_counted_and_said(self, where: str, why: str) -> None:
        events = RunEvents(RunFile(where, "job"))
        events.joined(0, "a")
        events.receive(0, batch(line(), line()))
        said = events.close()
        assert where in said and why in said and "event files" in said
        assert events.statistics()["events_dropped"] == 2

    def test_an_unexpected_error_costs_one_batch_and_is_reported(self, path: str) -> None:
        class Failing(RunFile):
            def write(self, node: NodeEvents, batch: EventBatch, received_ns: int) -> None:
                if self.lines == 1 and not self.trouble:
                    raise RecursionError("too\ndeep")
                super().write(node, batch, received_ns)

        events = RunEvents(Failing(path, "job"))
        events.joined(0, "a")
        for name in ("one", "two", "three"):
            events.receive(0, batch(line(name)))
        said = events.close(5.0)
        assert [event.name for event in written(path)] == ["one", "three"]
        assert f"{path} lacks events: RecursionError: too deep" in said
        assert told(path)["a"].attrs == {"bad": 1} and events.queued_bytes == 0

    def test_a_line_cut_off_by_a_full_disk_costs_only_itself(self, path: str) -> None:
        code = f"""
import json, resource
from launcher.coordinator.run_file import NodeEvents, RunFile
from tests.unit.launcher.coordinator.test_run_events import batch, line
file, node = RunFile({path!r}, "job"), NodeEvents("a")
file.write(node, batch(line("one")), 10**12)
resource.setrlimit(resource.RLIMIT_FSIZE, (500, resource.RLIM_INFINITY))
file.write(node, batch(line("two"), line("three"), line("four")), 10**12)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
file.write(node, batch(line("five")), 10**12)
file.leave(node)
file.close()
print(json.dumps([node.reasons(), file.lines, file.trouble]))
"""
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
        assert run.returncode == 0, run.stderr
        reasons, lines, trouble = json.loads(run.stdout)
        names = [event.name for event in read_events(path)]
        assert names[0] == "one" and names[-2:] == ["five", EVENTS_DROPPED]
        assert reasons == {"disk": 3 - (len(names) - 3)}
        assert lines == len(names) and trouble
        assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 500


def test_a_node_with_no_missing_lines_is_not_spoken_of(path: str) -> None:
    file, node = RunFile(path, "job"), NodeEvents("a")
    file.write(node, batch(line()), 10**15)
    file.leave(node)
    file.close()
    assert [event.name for event in read_events(path)] == ["x"]
