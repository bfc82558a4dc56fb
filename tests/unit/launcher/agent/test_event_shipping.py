"""What a node sends of its event files, and when; the connection is planned here, files and loop are real."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launcher.agent import event_shipping
from launcher.agent.event_files import EventFile
from launcher.agent.event_shipping import LAST_S, Shipper
from launcher.base.loop import Loop
from launcher.rendezvous.clock import UNKNOWN_NS
from launcher.rendezvous.event_batch import BURST_BYTES, HEARTBEATS_BURST_BYTES, unpack
from launcher.rendezvous.messages import EventBatch


class Way:
    """A connection that takes what it is allowed to."""

    def __init__(self) -> None:
        self.batches: list[EventBatch] = []
        self.can_ship = True
        self.error_ns = 1000
        self.is_ended = False

    def ship(self, batch: EventBatch) -> None:
        assert self.can_ship and not self.is_ended
        self.batches.append(batch)

    def end_shipping(self) -> None:
        self.is_ended = True

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        return local_ns + 5, self.error_ns

    @property
    def lines(self) -> list[str]:
        """The names of the events that were sent."""
        found = []
        for batch in self.batches:
            lines = unpack(batch.data, batch.raw_bytes, batch.lines)
            assert lines is not None
            found += [json.loads(line)["name"] for line in lines]
        return found


class Bed:
    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(event_shipping, "PERIOD_S", 0.02)
        monkeypatch.setattr(event_shipping, "AGAIN_S", 0.005)
        self.folder = folder
        self.loop = Loop()
        self.way = Way()
        self.own = os.fspath(folder / "agent.jsonl")
        self.write("agent", "old")
        self.shipper = Shipper(self.loop, self.way, EventFile(self.own), 2)

    def rank(self, number: int, attempt: int = 0) -> str:
        return os.fspath(self.folder / f"rank-{number}-{attempt}.jsonl")

    def follow(self, *ranks: int, attempt: int = 0) -> None:
        self.shipper.follow([self.rank(number, attempt) for number in ranks], 2)

    def write(self, file: str, *names: str, kind: str = "instant", more: str = "") -> None:
        with (self.folder / f"{file}.jsonl").open("a") as out:
            for name in names:
                stage = "null" if kind == "scalar" else '"spawn"'
                out.write(f'{{"v":1,"stage":{stage},"kind":"{kind}","name":"{name}","more":"{more}"}}\n')

    def until(self, condition: Callable[[], Any], deadline_s: float = 10.0) -> None:
        end_s = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end_s, (self.way.lines[-20:], self.shipper.statistics())
            self.loop.run_once(0.02)

    def finish(self) -> None:
        """The job is over, and all is written."""
        self.shipper.finish()
        self.shipper.end()

    def rounds(self, count: int = 5) -> None:
        """Lets so many looks pass."""
        for _ in range(count):
            due_s = self.shipper._due_s
            self.until(lambda due_s=due_s: self.shipper._due_s != due_s)


@pytest.fixture
def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bed]:
    bed = Bed(tmp_path, monkeypatch)
    yield bed
    bed.shipper.close()
    bed.loop.close()


def test_new_lines_of_all_files_are_sent(bed: Bed) -> None:
    bed.write("agent", "a1")
    bed.follow(0, 1)
    bed.write("rank-0-0", "r0")
    bed.write("rank-1-0", "r1")
    bed.until(lambda: len(bed.way.lines) == 3)
    assert sorted(bed.way.lines) == ["a1", "r0", "r1"]
    bed.write("rank-1-0", "r1 again")
    bed.until(lambda: len(bed.way.lines) == 4)
    batch = bed.way.batches[-1]
    assert (batch.job_ns - batch.local_ns, batch.error_ns) == (5, 1000)
    bed.rounds()
    assert len(bed.way.lines) == 4


def test_nothing_is_sent_before_the_clocks_have_been_compared(bed: Bed) -> None:
    bed.way.error_ns = UNKNOWN_NS
    bed.write("agent", "a1")
    bed.rounds()
    assert bed.way.batches == []
    bed.way.error_ns = 3
    bed.until(lambda: bed.way.lines == ["a1"])


def test_at_the_end_it_is_sent_without_a_clock(bed: Bed) -> None:
    bed.way.error_ns = UNKNOWN_NS
    bed.write("agent", "a1")
    bed.finish()
    assert bed.way.lines == ["a1"] and bed.way.is_ended


def test_a_busy_connection_is_left_alone_and_nothing_is_lost(bed: Bed) -> None:
    bed.way.can_ship = False
    bed.follow(0)
    for number in range(2000):
        bed.write("rank-0-0", f"x{number}", more="y" * 1000)
    bed.rounds()
    waiting = bed.shipper.statistics()["waiting"]
    assert bed.way.batches == [] and 0 < waiting < 1200  # what it has read; the rest waits in the file
    bed.way.can_ship = True
    bed.until(lambda: len(bed.way.lines) == 2000)
    assert bed.way.lines == [f"x{number}" for number in range(2000)]


def test_a_flood_of_heartbeats_costs_no_other_event(bed: Bed) -> None:
    bed.follow(0, 1)
    bed.write("rank-0-0", *["beat"] * 100_000, kind="scalar")
    bed.write("rank-0-0", "step")
    bed.write("rank-1-0", "other")
    bed.until(lambda: {"step", "other"} <= set(bed.way.lines))
    figures = bed.shipper.statistics()
    sent = bed.way.lines.count("beat")
    assert sent + figures["dropped_rate"] == 100_000
    assert 0 < sent * 60 < 4 * HEARTBEATS_BURST_BYTES
    bed.finish()
    assert bed.way.batches[-1].dropped.rate == figures["dropped_rate"]


def test_drops_are_reported_also_when_there_is_no_line_to_send(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.follow(0)
    bed.write("rank-0-0", *["beat"] * 3000, kind="scalar")
    bed.until(lambda: bed.shipper.statistics()["dropped_rate"] > 0)
    bed.rounds(2)
    bed.write("rank-0-0", "long", more="x" * 20_000)
    monkeypatch.setattr(event_shipping, "REPORT_DROPS_S", 0.05)
    bed.until(lambda: bed.way.batches[-1].dropped.long == 1)
    assert bed.way.batches[-1].data == b""


def test_too_many_other_events_wait_in_their_file(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    bed.follow(0)
    for _ in range(BURST_BYTES // 15_000 + 200):
        bed.write("rank-0-0", "x", more="y" * 15_000)
    bed.until(lambda: sum(batch.raw_bytes for batch in bed.way.batches) > BURST_BYTES)
    bed.rounds(3)
    sent = sum(batch.raw_bytes for batch in bed.way.batches)
    assert sent < BURST_BYTES + event_shipping.ROUND_BYTES + 300_000
    assert sum(bed.way.batches[-1].dropped) == 0
    bed.shipper.finish()  # ... but not for longer than the job
    bed.until(lambda: bed.way.is_ended, LAST_S + 1)
    assert len(bed.way.lines) + bed.way.batches[-1].dropped.unread == BURST_BYTES // 15_000 + 200


def test_a_file_that_grows_too_fast_loses_its_oldest_part(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bed.shipper, "_max_behind_bytes", 100_000)
    monkeypatch.setattr(event_shipping, "_KEPT_BEHIND_BYTES", 10_000)
    bed.follow(0)
    bed.write("rank-0-0", *(f"x{number}" for number in range(20_000)))
    bed.write("rank-0-0", "last")
    bed.until(lambda: "last" in bed.way.lines)
    bed.finish()
    assert len(bed.way.lines) + bed.way.batches[-1].dropped.unread == 20_001
    assert len(bed.way.lines) < 1000


def test_the_files_of_an_attempt_are_read_to_their_end_and_forgotten(bed: Bed) -> None:
    bed.follow(0, 1)
    bed.write("rank-0-0", "first")
    with (bed.folder / "rank-1-0.jsonl").open("a") as file:
        file.write('{"v":1,"name":"cut')
    bed.follow(0, 1, attempt=1)
    bed.write("rank-0-1", "second")
    bed.until(lambda: sorted(bed.way.lines) == ["first", "second"])
    bed.until(lambda: bed.shipper.statistics()["files"] == 3)
    assert bed.shipper.statistics()["dropped_torn"] == 1


def test_a_restart_with_the_files_of_an_older_run_in_the_way(bed: Bed) -> None:
    bed.write("rank-0-0", "older", "older")
    bed.follow(0)
    bed.write("rank-0-0", "new")
    bed.until(lambda: bed.way.lines == ["new"])


def test_the_end_is_sent_at_once(bed: Bed) -> None:
    bed.follow(0)
    bed.write("rank-0-0", *(f"x{number}" for number in range(5000)))
    bed.finish()
    assert len(bed.way.lines) == 5000 and bed.way.is_ended
    bed.finish()
    bed.shipper.flush()
    assert len(bed.way.lines) == 5000


def test_what_is_written_after_the_end_of_the_job_is_sent_as_well(bed: Bed) -> None:
    bed.write("agent", "a1")
    bed.shipper.finish()
    assert bed.way.lines == ["a1"] and not bed.way.is_ended
    bed.write("agent", "a2")
    bed.shipper.end()
    assert bed.way.lines == ["a1", "a2"] and bed.way.is_ended


def test_who_takes_long_to_end_is_not_waited_for(bed: Bed) -> None:
    bed.shipper.finish()
    bed.write("agent", "a1")
    bed.until(lambda: bed.way.is_ended, LAST_S + 2)
    assert bed.way.lines == ["a1"]
    bed.shipper.end()


def test_the_end_waits_for_a_busy_connection_but_not_for_long(bed: Bed) -> None:
    bed.write("agent", "a1")
    bed.way.can_ship = False
    bed.finish()
    began_s = time.monotonic()
    bed.until(lambda: bed.way.is_ended, LAST_S + 2)
    assert bed.way.batches == []
    assert LAST_S - 0.1 < time.monotonic() - began_s < LAST_S + 1


def test_the_end_goes_on_when_the_connection_is_free_again(bed: Bed) -> None:
    bed.write("agent", "a1")
    bed.way.can_ship = False
    bed.finish()
    bed.way.can_ship = True
    bed.until(lambda: bed.way.is_ended)
    assert bed.way.lines == ["a1"]


def test_who_leaves_sends_what_goes_now(bed: Bed) -> None:
    bed.write("agent", "a1")
    bed.shipper.flush()
    assert bed.way.lines == ["a1"] and not bed.way.is_ended
    bed.write("agent", "a2")
    bed.follow(0)
    bed.shipper.hurry()
    bed.loop.run_once(0.05)
    assert bed.way.lines == ["a1"]


def test_who_hurries_looks_sooner(tmp_path: Path) -> None:
    loop, way = Loop(), Way()
    path = tmp_path / "agent.jsonl"
    shipper = Shipper(loop, way, EventFile(os.fspath(path)), 100_000)  # looks every 200 s
    shipper.hurry()
    assert shipper._due_s - loop.time() < 35
    before = shipper._due_s
    shipper.hurry()
    assert shipper._due_s <= before
    shipper.close()
    loop.close()


def test_nodes_do_not_look_in_step(tmp_path: Path) -> None:
    loop = Loop()
    path = os.fspath(tmp_path / "agent.jsonl")
    shippers = [Shipper(loop, Way(), EventFile(path), 5000) for _ in range(50)]
    dues = sorted(shipper._due_s - loop.time() for shipper in shippers)
    assert dues[0] < 2.5 and dues[-1] > 7.5 and dues[-1] < 10.1
    for shipper in shippers:
        shipper.close()
    loop.close()
