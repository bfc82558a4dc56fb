"""Dumps of the flight recorder on disk: which count, and that reading them harms nobody."""

from __future__ import annotations

import json
import os
import pickle
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from bootseer.hangs.flight import read_dump
from launcher.base.loop import Loop
from launcher.monitor.collectives import devices_child, flight_child
from launcher.monitor.collectives import flight_recorder as flight
from launcher.monitor.collectives.accelerators import DeviceUse
from launcher.monitor.collectives.flight_child import find_dumps
from launcher.monitor.collectives.flight_recorder import DeviceReader, DeviceSample, RankFiles, RankFilesReader
from launcher.monitor.collectives.ring import RankRing, pack_rings
from launcher.monitor.failure import files as failure_files
from launcher.monitor.failure.files import FailureFiles
from launcher.monitor.failure.record import FORMAT, pack
from launcher.monitor.watch import find_causes_in
from launcher.rendezvous.messages import FailureRecordMessage
from tests.unit.bootseer.hangs.test_flight import OPEN, dump, entry
from tests.unit.bootseer.health.machines import compile_nvml, write_values

HERE = dump(entry(0, "nccl:all_reduce"), entry(1, "nccl:all_reduce", **OPEN))
GONE = dump(entry(0, "nccl:all_reduce"))


def test_only_new_ones_count_and_the_reported_place_first(tmp_path: Path) -> None:
    told, cache = tmp_path / "told_", tmp_path / "torch" / "comm_lib_trace_rank_"
    cache.parent.mkdir()
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(told), "XDG_CACHE_HOME": str(tmp_path)}
    for path in (f"{told}0", f"{cache}0", f"{cache}1", f"{cache}2"):
        Path(path).write_bytes(GONE)
    os.utime(f"{cache}2", (1, 1))
    assert find_dumps([0, 1, 2, 3], environ, 100.0) == {0: f"{told}0", 1: f"{cache}1"}


def read(loop: Loop, ranks: Iterable[int], layout: str = "") -> RankFiles:
    reader, found = RankFilesReader(loop), list[RankFiles]()
    reader.read(found.append, ranks, layout=layout)
    assert found == [], "never from within"
    run_until(loop, lambda: bool(found))
    assert not reader.is_busy
    return found[0]


def run_until(loop: Loop, condition: Callable[[], bool]) -> None:
    end_s = loop.time() + 20.0
    while not condition():
        assert loop.time() < end_s
        loop.run_once(0.1)


def test_what_is_read_is_packed_as_rings_are(loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    for rank, data in enumerate((HERE, GONE, b"junk")):
        (tmp_path / f"rank_{rank}").write_bytes(data)
    (tmp_path / "rank_3").symlink_to("/dev/zero")
    (tmp_path / "layout").write_text("tp=2")
    found = read(loop, range(5), str(tmp_path / "layout"))
    (cause,) = find_causes_in([found.traces], {})
    assert (cause.ranks, cause.victims) == ((1,), (0,))
    assert found.layout == "tp=2"
    assert read(loop, (3,), str(tmp_path / "gone")) == RankFiles(), "no plain file"


def test_a_number_that_asks_for_all_memory_costs_only_the_reader(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    (tmp_path / "rank_0").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f" + pickle.dumps({"entries": []})[2:])
    assert read(loop, (0,)) == RankFiles()
    assert flight_child.MEMORY_BYTES <= 2 << 30


@pytest.fixture
def nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the values of a driver that is made up."""
    Path(compile_nvml(tmp_path)).rename(tmp_path / devices_child.NVML)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "values"))
    return tmp_path / "values"


def read_devices(loop: Loop) -> tuple[DeviceSample, ...]:
    reader, found = DeviceReader(loop), list[tuple[DeviceSample, ...]]()
    reader.read(found.append)
    run_until(loop, lambda: bool(found))
    assert len(found) == 1 and not reader.is_busy
    return found[0]


def test_what_accelerators_do_is_had_from_the_driver(loop: Loop, nvml: Path) -> None:
    write_values(nvml, {"count": 1, "use": 100, "use_memory": 0, "power": 123000, "process": 77})
    assert read_devices(loop) == (DeviceSample(DeviceUse(0, 100, 0, 123.0, ()), (77, 78)),)
    write_values(nvml, {"count": 1})
    assert read_devices(loop) == (), "it does not tell"


def test_a_driver_that_is_not_there_or_hangs_holds_nobody(
    loop: Loop, nvml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_values(nvml, {"hang": 1})
    monkeypatch.setattr(flight, "LIMIT_S", 0.3)
    assert read_devices(loop) == ()
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    assert read_devices(loop) == ()


def test_a_file_that_never_ends_to_be_opened_holds_nobody(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flight, "LIMIT_S", 0.3)
    os.mkfifo(tmp_path / "layout")
    began_s = time.monotonic()
    reader, found = RankFilesReader(loop), list[RankFiles]()
    reader.read(found.append, (), layout=str(tmp_path / "layout"))
    assert time.monotonic() - began_s < 0.2
    run_until(loop, lambda: bool(found))
    assert found == [RankFiles()]


PAGE = pack({"format": FORMAT, "class": "killed", "attempt": 0})


def test_a_failures_page_says_who_kept_whom_waiting(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    for rank, data in enumerate((HERE, GONE)):
        (tmp_path / f"rank_{rank}").write_bytes(data)
    files = FailureFiles(loop, str(tmp_path), lambda: 0.0, print, time.time() - 1)
    done: list[bool] = []

    def keep(number: int) -> dict[str, Any]:
        files.keep(FailureRecordMessage(number, PAGE), 0, None)
        return json.loads((tmp_path / f"failure-{number}.json").read_text())

    def finish() -> None:
        files.finish(lambda: done.append(True))
        run_until(loop, lambda: bool(done))
        done.clear()

    assert "causes" not in keep(0), "it is written at once"
    finish()
    text = (tmp_path / "failure-0.txt").read_text()
    assert "collectives:\n  root cause (certain): rank 1 has not entered all_reduce #2 of group world" in text
    record = json.loads((tmp_path / "failure-0.json").read_text())
    assert record["causes"][0]["ranks"] == [1]
    keep(1)
    finish()
    assert "causes" not in json.loads((tmp_path / "failure-1.json").read_text()), "it is told once"
    again = keep(0)
    assert (again["causes"], again["collectives"]) == (record["causes"], record["collectives"])
    assert files.last_path == str(tmp_path / "failure-1.txt"), "which is newer"
    files.finish(lambda: done.append(True))
    assert done, "nothing is read any more"


def test_a_page_that_comes_again_keeps_what_rings_have_reported(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cause = find_causes_in([pack_rings(two_ranks(), 0, 1 << 16)], {})
    monkeypatch.setattr(failure_files, "_find_mismatches", lambda rings: list(cause) if rings else [])
    files = FailureFiles(loop, str(tmp_path), lambda: 0.0, print, time.time())

    def keep(number: int, data: bytes, rings: failure_files.Rings) -> dict[str, Any]:
        files.keep(FailureRecordMessage(number, data), 0, None, rings)
        return json.loads((tmp_path / f"failure-{number}.json").read_text())

    first = keep(0, PAGE, (0, {0: b"ring"}))
    assert first["causes"][0]["ranks"] == [1]
    assert "causes" not in keep(1, PAGE, (3, {0: b"ring"})), "of another attempt"
    told = pack({"format": FORMAT, "class": "killed", "attempt": 0, "collectives": "by all nodes"})
    again = keep(0, told, (1, {}))
    assert (again["causes"], again["collectives"]) == (first["causes"], "by all nodes")
    files.close()


def two_ranks() -> list[RankRing]:
    traces = [read_dump(data, rank) for rank, data in enumerate((HERE, GONE))]
    return [RankRing(each.rank, each.calls, False) for each in traces if each is not None]
