"""One file with the events of all nodes of a job; each node has its own folder of events, as nodes have."""

from __future__ import annotations

import fcntl
import glob
import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bench import hosts as scenarios
from bench import netns
from bootseer.events import EVENTS_DROPPED, RANK_EXITED, Event, read_events, run_events_path
from launcher.coordinator.run_events import RunEvents
from launcher.coordinator.run_file import RunFile
from launcher.rendezvous.codec import MAX_EVENTS_BYTES
from launcher.rendezvous.event_batch import pack
from launcher.rendezvous.messages import (
    DroppedFromJob,
    EventBatch,
    EventsDropped,
    Finish,
    WantEvents,
    Welcome,
    World,
)
from tests import support
from tests.integration.rendezvous_parts import Bed, Node, Server, make_join, settings

Script = Callable[..., str]
TRAINS = """
import bootseer, os, sys
for step in range(3):
    bootseer.heartbeat(step)
"""


class Nodes:
    """Two nodes with folders of their own, the first one with the coordinator."""

    def __init__(self, bootrun: support.Programs, folder: Path, port: int, *flags: str) -> None:
        self._bootrun = bootrun
        self._port = port
        self._flags = flags
        self.folders = [folder / "events-of-0", folder / "events-of-1"]
        self.run_path = run_events_path(os.fspath(self.folders[0]))

    def start(self, number: int, script: str, *args: str, events: str = "") -> support.Program:
        return self._bootrun.start(
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "job"),
            *("--rdzv-conf", f"is_host={int(number == 0)}", "--node-rank", number),
            # What is recorded of a start is done at any time, and may be written when all else is over.
            *("--events-dir", events or self.folders[number], "--record-start", "off"),
            *self._flags,
            script,
            *args,
        )

    def run(self, script: str, *args: str) -> list[support.Run]:
        programs = [self.start(number, script, *args) for number in (0, 1)]
        return [program.wait(60.0) for program in programs]

    def of_run(self) -> list[Event]:
        """The run file's events, without counts of what is missing."""
        return [event for event in read_events(self.run_path) if event.name != EVENTS_DROPPED]

    def of_nodes(self) -> list[Event]:
        """What the nodes' own files hold."""
        return [
            event
            for directory in self.folders
            for path in sorted(directory.glob("*.jsonl"))
            if os.fspath(path) != self.run_path
            for event in read_events(os.fspath(path))
        ]

    def dropped(self) -> int:
        """What is missing of all nodes, as the run file says it in the end."""
        found = {event.node: event.value for event in read_events(self.run_path) if event.name == EVENTS_DROPPED}
        return sum(int(value or 0) for value in found.values())


@pytest.fixture
def nodes(bootrun: support.Programs, tmp_path: Path, free_port: int) -> Nodes:
    return Nodes(bootrun, tmp_path, free_port, "--nnodes", "2")


def plain(events: list[Event]) -> list[str]:
    return sorted(repr(event._replace(job_ns=None, job_error_ns=None)) for event in events)


class TestWholeJobs:
    def test_all_events_of_both_nodes_are_in_one_file_by_one_clock(self, nodes: Nodes, script: Script) -> None:
        runs = nodes.run(script(TRAINS))
        assert [run.status for run in runs] == [0, 0], runs
        events = nodes.of_run()
        assert plain(events) == plain(nodes.of_nodes())
        assert not (nodes.folders[1] / "run.jsonl").exists()
        assert {event.rank for event in events if event.name == "script"} == {0, 1}
        assert {event.rank for event in events if event.name == RANK_EXITED} == {0, 1}
        assert {event.rank for event in events if event.stage == "first_step"} == {0, 1}
        for event in events:
            assert event.job_ns is not None and event.job_error_ns is not None
            # One machine: the clocks are the same, and the bound must hold.
            assert abs(event.job_ns - event.mono_ns) <= event.job_error_ns < 10**9
            assert event.rank != 0 or event.job_error_ns == 0
        assert nodes.dropped() == 0

    def test_a_rank_that_was_killed_has_its_events_sent(
        self, bootrun: support.Programs, tmp_path: Path, free_port: int, script: Script
    ) -> None:
        nodes = Nodes(bootrun, tmp_path, free_port, "--nnodes", "2", "--max-restarts", "1")
        text = TRAINS + "if os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        runs = nodes.run(script(text + "    os.kill(os.getpid(), 9)\nelse: import time; time.sleep(0.3)\n"))
        assert [run.status for run in runs] == [0, 0], runs
        events = nodes.of_run()
        assert plain(events) == plain(nodes.of_nodes())
        killed = [event for event in events if (event.rank, event.attempt) == (1, 0)]
        assert {"script", "heartbeat", RANK_EXITED} <= {event.name for event in killed}
        assert next(event for event in killed if event.name == RANK_EXITED).attrs["status"] == -signal.SIGKILL
        assert {event.rank for event in events if event.attempt == 1 and event.name == "script"} == {0, 1}

    def test_a_flood_is_bounded_and_counted_and_holds_nobody_up(self, nodes: Nodes, script: Script) -> None:
        text = """
import bootseer, glob, os, sys, time
bootseer.heartbeat(0)
if os.environ["RANK"] == "1":
    [path] = glob.glob(sys.argv[1] + "/rank-1-attempt-0-*.jsonl")
    line = open(path).readline().replace('"stage":"spawn","kind":"instant","name":"script"',
                                         '"stage":null,"kind":"scalar","name":"heartbeat","value":7')
    assert '"heartbeat"' in line
    for _ in range(200):
        with open(path, "a") as file:
            file.write(line * 1000)
    with open(path, "a") as file:
        file.write(line.replace("heartbeat", "after_the_flood").replace("null", '"first_step"', 1))
    open(sys.argv[1] + "/ended", "w").write(str(time.monotonic()))
"""
        runs = nodes.run(script(text), os.fspath(nodes.folders[1]))
        ended_s = time.monotonic()
        assert [run.status for run in runs] == [0, 0], runs
        assert ended_s - float((nodes.folders[1] / "ended").read_text()) < 5.0
        events = nodes.of_run()
        assert len(events) + nodes.dropped() == len(nodes.of_nodes()) > 200_000
        assert os.path.getsize(nodes.run_path) < 4_000_000
        assert {event.name for event in events if event.rank == 1} >= {"script", RANK_EXITED}
        assert {event.name for event in events if event.rank == 0} >= {"script", RANK_EXITED}

    def test_files_of_older_runs_and_half_written_lines(self, nodes: Nodes, script: Script) -> None:
        for directory in nodes.folders:
            directory.mkdir()
            host = os.uname().nodename
            for name in (f"agent-{host}", "rank-0-attempt-0-" + host, "rank-1-attempt-0-" + host):
                (directory / f"{name}.jsonl").write_text('{"v":1,"name":"older"}\n{"v":1,"run_id":"job","na')
        runs = nodes.run(script(TRAINS))
        assert [run.status for run in runs] == [0, 0], runs
        events = nodes.of_run()
        names = [(event.rank, event.name) for event in events]
        assert (0, "script") in names and (1, "script") in names
        # The first line of each file has become part of the cut-off one, for who reads them there.
        assert len(events) >= len(nodes.of_nodes())
        assert nodes.dropped() == 0

    @pytest.mark.parametrize("silent", [0, 1])
    def test_a_node_without_events(self, nodes: Nodes, script: Script, silent: int) -> None:
        path = script(TRAINS)
        programs = [nodes.start(number, path, events="/dev/null" if number == silent else "") for number in (0, 1)]
        assert [program.wait(60.0).status for program in programs] == [0, 0]
        assert os.path.exists(nodes.run_path) == (silent == 1)
        assert {event.rank for event in nodes.of_run()} - {None} == (set() if silent == 0 else {0})
        assert {event.rank for event in nodes.of_nodes()} - {None} == {1 - silent}

    def test_a_disk_of_the_coordinator_that_hangs(self, nodes: Nodes, script: Script) -> None:
        nodes.folders[0].mkdir()
        os.mkfifo(nodes.run_path)
        began_s = time.monotonic()
        runs = nodes.run(script(TRAINS))
        assert [run.status for run in runs] == [0, 0], runs
        assert time.monotonic() - began_s < 20.0
        assert "run.jsonl lacks events: the disk accepted no data for 1 s" in runs[0].stderr
        assert "lacks" not in runs[1].stderr

    def test_without_the_coordinator_the_nodes_own_files_hold_everything(
        self, nodes: Nodes, script: Script
    ) -> None:
        path = script(TRAINS + "import time; time.sleep(60)\n")
        first, second = nodes.start(0, path), nodes.start(1, path)
        # One rank makes three steps, whether or not the other one has begun.
        support.wait_until(lambda: {e.rank for e in nodes.of_nodes() if e.name == "heartbeat"} == {0, 1}, 20.0)
        first.signal(signal.SIGKILL)
        assert second.wait(30.0).status == 1
        events = nodes.of_nodes()
        assert any((event.rank, event.name) == (1, RANK_EXITED) for event in events)

    def test_a_node_that_leaves_and_comes_back(
        self, bootrun: support.Programs, tmp_path: Path, free_port: int, script: Script
    ) -> None:
        nodes = Nodes(bootrun, tmp_path, free_port, "--nnodes", "1:2", "--signal-scope", "node")
        path = script(TRAINS + "import time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.05)\n")
        finish = tmp_path / "finish"

        def lives() -> set[int | None]:
            """Attempts in which rank 1 has made its first step."""
            return {event.attempt for event in nodes.of_run() if (event.rank, event.stage) == (1, "first_step")}

        first = nodes.start(0, path, os.fspath(finish))
        support.wait_until(lambda: "no secret" in first.stderr, 20.0)
        second = nodes.start(1, path, os.fspath(finish))
        support.wait_until(lives, 60.0)
        second.signal(signal.SIGTERM)
        assert second.wait(20.0).status == 143
        # What it wrote last was sent before it left.
        support.wait_until(lambda: any((e.rank, e.name) == (1, RANK_EXITED) for e in nodes.of_run()), 5.0)
        third = nodes.start(1, path, os.fspath(finish))
        support.wait_until(lambda: len(lives()) == 2, 60.0)
        finish.touch()
        assert first.wait(20.0).status == third.wait(20.0).status == 0
        assert plain(nodes.of_run()) == plain(nodes.of_nodes())


class TestStoppedWhileStarting:
    def test_the_end_of_a_rank_is_written(self, bootrun: support.Programs, tmp_path: Path) -> None:
        program = tmp_path / "program"
        program.write_text("#!/bin/sh\nexec sleep 60\n")
        program.chmod(0o755)
        events = tmp_path / "events"
        with held_back(program):
            job = bootrun.start(
                "--standalone", "--nproc-per-node", "2", "--events-dir", events, "--no-python", program
            )
            # The guard, and what it has forked and does not have its own name yet.
            names = lambda: [each.name for each in support.descendants(job.pid)]  # noqa: E731
            support.wait_until(lambda: names().count("bootrun-guard") == 3, 20.0)
            job.signal(signal.SIGTERM)
            support.wait_until(lambda: "stopping attempt 0" in job.stderr, 20.0)
        assert job.wait(20.0).status == 128 + signal.SIGTERM
        found = [event for path in events.glob("*.jsonl") for event in read_events(os.fspath(path))]
        ends = [(event.rank, event.attrs["status"]) for event in found if event.name == RANK_EXITED]
        assert sorted(ends) == [(0, -15), (1, -15)]
        assert all(event.attrs.get("launch_s", 0) >= 0 for event in found)  # it did not begin with their end


@contextmanager
def held_back(path: Path) -> Iterator[None]:
    """Whoever executes the file waits for the end of this, which has a lease of it."""
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    fd = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        except OSError as error:
            support.lacking(f"no lease of a file: {error}")
        yield
    finally:
        os.close(fd)
        signal.signal(signal.SIGIO, before)


class TestHostileNodes:
    @pytest.fixture
    def bed(self) -> Iterator[Bed]:
        bed = Bed()
        yield bed
        bed.close()

    @pytest.fixture
    def events(self, tmp_path: Path) -> Iterator[RunEvents]:
        events = RunEvents(RunFile(os.fspath(tmp_path / "run.jsonl"), "run"))
        yield events
        events.close(5.0)

    @staticmethod
    def line(name: str, run_id: str = "run", node: str = "node0") -> bytes:
        who = f'"run_id":"{run_id}","node":"{node}","rank":1,"attempt":0'
        return f'{{"v":1,"wall_ns":1,"mono_ns":1,{who},"stage":null,"kind":"instant","name":"{name}"}}'.encode()

    @staticmethod
    def batch(*lines: bytes) -> EventBatch:
        now_ns = time.monotonic_ns()
        return EventBatch(*pack(lines), now_ns, now_ns, 1, EventsDropped(0, 0, 0, 0))

    def test_only_what_is_true_is_written(self, bed: Bed, events: RunEvents, tmp_path: Path) -> None:
        server = Server(bed, events=events)
        pair = [Node(bed, settings(server.port, is_host=False), make_join(number)) for number in range(2)]
        bed.until(lambda: all(node.last(World) and node.last(WantEvents) is not None for node in pair))
        bomb = zlib.compress(bytes(60 << 20), 9)
        assert len(bomb) <= MAX_EVENTS_BYTES
        send = pair[1].member.send
        send(self.batch(self.line("one", node="node0"), self.line("no", run_id="other"), b"junk", b"[" * 9000))
        send(self.batch(self.line("x"))._replace(data=bomb, raw_bytes=1 << 20))
        send(self.batch(self.line("x"))._replace(data=b"junk"))
        send(self.batch(self.line("two")))
        bed.until(lambda: events.statistics()["batches"] == 4)
        for node in pair:
            node.succeed()  # nobody was thrown out
        bed.until(lambda: all(node.last(Finish) for node in pair))
        assert events.close(5.0) == ""
        found = list(read_events(os.fspath(tmp_path / "run.jsonl")))
        assert [(event.node, event.name) for event in found] == [
            ("node1", "one"),
            ("node1", EVENTS_DROPPED),
            ("node1", "two"),
            ("node1", EVENTS_DROPPED),
        ]
        assert found[-1].attrs == {"bad": 5}

    def test_events_that_nobody_asked_for_end_the_connection(self, bed: Bed) -> None:
        server = Server(bed)
        node = Node(bed, settings(server.port, is_host=False), make_join(1))
        bed.until(lambda: node.last(Welcome))
        assert node.last(WantEvents) is None
        node.member.send(self.batch(self.line("x")))
        bed.until(lambda: server.count("ended") == 1)
        bed.until(lambda: node.last(DroppedFromJob))

    def test_events_after_the_end_are_taken_and_nothing_else_is(
        self, bed: Bed, events: RunEvents, tmp_path: Path
    ) -> None:
        server = Server(bed, nodes=1, events=events)
        node = Node(bed, settings(server.port, is_host=False), make_join(1, 1))
        bed.until(lambda: node.last(World))
        node.member.begin_shipping()
        node.succeed()
        bed.until(lambda: node.last(Finish))
        assert not node.member.is_closed and node.member.can_ship
        node.member.ship(self.batch(self.line("late")))
        node.member.end_shipping()
        bed.until(lambda: node.member.is_closed and server.count("ending") == 0, 0.9)
        assert events.close(5.0) == ""
        assert [event.name for event in read_events(os.fspath(tmp_path / "run.jsonl"))] == ["late"]

    def test_a_node_that_forgets_to_end_is_ended(self, bed: Bed, events: RunEvents) -> None:
        server = Server(bed, nodes=1, events=events)
        node = Node(bed, settings(server.port, is_host=False), make_join(1, 1))
        bed.until(lambda: node.last(World))
        node.member.begin_shipping()
        node.succeed()
        bed.until(lambda: node.last(Finish))
        began_s = time.monotonic()
        bed.until(lambda: node.member.is_closed and server.count("ending") == 0, 5.0)
        assert time.monotonic() - began_s > 0.5

    def test_a_coordinator_that_does_not_read_gets_no_more(self, bed: Bed, events: RunEvents) -> None:
        server = Server(bed, nodes=1, events=events)
        node = Node(bed, settings(server.port, is_host=False), make_join(1, 1))
        bed.until(lambda: node.last(World))
        [fd] = server.coordinator._peers
        server.coordinator._poll.remove(fd)
        noise = self.batch(*(os.urandom(8000).replace(b"\n", b"x") for _ in range(6)))
        count = 0
        while node.member.can_ship:
            node.member.ship(noise)
            bed.loop.run_once(0)
            count += 1
            assert count < 2000
        connection = node.member._connection
        assert connection is not None and len(connection._queue) < 2 * MAX_EVENTS_BYTES
        server.coordinator._poll.add(fd)
        bed.until(lambda: node.member.can_ship)
        node.succeed()
        bed.until(lambda: node.last(Finish))


@pytest.mark.system
@pytest.mark.slow
class TestHosts:
    @pytest.fixture
    def two_hosts(self) -> Iterator[netns.Hosts]:
        reason = netns.why_not()
        if reason:
            support.lacking(reason)
        with netns.Hosts(2) as made:
            yield made

    @staticmethod
    def read(hosts: netns.Hosts, number: int, name: str) -> list[Event]:
        pattern = f"{hosts.folder}/logs-node{number}/*/events/{name}.jsonl"
        return [event for path in glob.glob(pattern) for event in read_events(path)]

    @pytest.mark.parametrize("ahead_s", [(0, 5), (5, 0)])
    def test_clocks_that_differ_are_mapped(self, two_hosts: netns.Hosts, ahead_s: tuple[int, int]) -> None:
        job = scenarios.Job(two_hosts, "--nnodes", "2", steps=20, ahead_s=ahead_s)
        job.wait_ended(60, 0, 1)
        assert job.outcome("", 0).statuses == (0, 0), job.read()
        events = self.read(two_hosts, 1, "run")
        own = [event for n in (1, 2) for name in ("agent-*", "rank-*") for event in self.read(two_hosts, n, name)]
        assert plain(events) == plain(own)
        assert {event.node for event in events} == {"node1", "node2"}
        # The wall clock is one of the machine: by it, both nodes' moments can be compared.
        by_node: dict[str, list[int]] = {"node1": [], "node2": []}
        for event in events:
            assert event.job_ns is not None and event.job_error_ns is not None
            by_node[event.node].append(event.wall_ns - event.job_ns)
            assert event.job_error_ns < 100_000_000
        middle = {node: sorted(values)[len(values) // 2] for node, values in by_node.items()}
        assert abs(middle["node1"] - middle["node2"]) < 100_000_000
        mono = {node: [e.mono_ns for e in events if e.node == node and e.name == "script"] for node in by_node}
        assert abs(mono["node1"][0] - mono["node2"][0]) > 3_000_000_000

    def test_events_of_a_host_that_died_are_there(self, two_hosts: netns.Hosts) -> None:
        job = scenarios.Job(two_hosts, "--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=5")
        job.wait_ready(2)
        job.wait_for(
            lambda: any((e.node, e.name) == ("node2", "script") for e in self.read(two_hosts, 1, "run")),
            20,
            "events",
        )
        two_hosts.hosts[1].kill()
        job.wait_for(lambda: "rank 0 of 1" in job.read()[0], 30, "the survivor's new world")
        job.wait_for(
            lambda: any((e.attempt or 0) > 0 and e.name == "script" for e in self.read(two_hosts, 1, "run")),
            20,
            "events of the next attempt",
        )
