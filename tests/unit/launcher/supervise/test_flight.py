"""Dumps of the flight recorder on disk: which count, and that reading them harms nobody."""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path

import pytest

from launcher.rendezvous.messages import FailurePage
from launcher.supervise import flight_child
from launcher.supervise.failure_files import FailureFiles
from launcher.supervise.failure_page import FORMAT, pack
from launcher.supervise.flight import find_dumps, read_dumps
from launcher.supervise.watch import find_causes_in
from tests.unit.bootseer.diagnose.test_flight import OPEN, dump, entry

HERE = dump(entry(0, "nccl:all_reduce"), entry(1, "nccl:all_reduce", **OPEN))
GONE = dump(entry(0, "nccl:all_reduce"))


def test_only_new_ones_count_and_the_told_place_first(tmp_path: Path) -> None:
    told, cache = tmp_path / "told_", tmp_path / "torch" / "comm_lib_trace_rank_"
    cache.parent.mkdir()
    environ = {"TORCH_FR_DUMP_TEMP_FILE": str(told), "XDG_CACHE_HOME": str(tmp_path)}
    for path in (f"{told}0", f"{cache}0", f"{cache}1", f"{cache}2"):
        Path(path).write_bytes(GONE)
    os.utime(f"{cache}2", (1, 1))
    assert find_dumps([0, 1, 2, 3], environ, 100.0) == {0: f"{told}0", 1: f"{cache}1"}


def test_what_is_read_is_packed_as_rings_are(tmp_path: Path) -> None:
    paths = {0: str(tmp_path / "0"), 1: str(tmp_path / "1"), 2: str(tmp_path / "2"), 3: str(tmp_path / "gone")}
    for path, data in zip(paths.values(), (HERE, GONE, b"junk"), strict=False):
        Path(path).write_bytes(data)
    (cause,) = find_causes_in([read_dumps(paths)], {})
    assert (cause.ranks, cause.victims) == ((1,), (0,))
    assert read_dumps({0: "/dev/zero"}) == b"", "no plain file"


def test_a_number_that_asks_for_all_memory_costs_only_the_reader(tmp_path: Path) -> None:
    (tmp_path / "0").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f" + pickle.dumps({"entries": []})[2:])
    assert read_dumps({0: str(tmp_path / "0")}) == b""
    assert flight_child.MEMORY_BYTES <= 2 << 30


def test_a_failures_page_says_who_kept_whom_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_DUMP_TEMP_FILE", str(tmp_path / "rank_"))
    for rank, data in enumerate((HERE, GONE)):
        (tmp_path / f"rank_{rank}").write_bytes(data)
    files = FailureFiles(str(tmp_path), lambda: 0.0, print, time.time() - 1)
    page = pack({"format": FORMAT, "class": "killed"})
    files.keep(FailurePage(0, page), 0, None)
    files.keep(FailurePage(1, page), 0, None)
    text = (tmp_path / "failure-0.txt").read_text()
    assert "collectives:\n  root cause (certain): rank 1 has not come to all_reduce #2 of group world" in text
    record = json.loads((tmp_path / "failure-0.json").read_text())
    assert record["causes"][0]["ranks"] == [1]
    assert "causes" not in json.loads((tmp_path / "failure-1.json").read_text()), "it is told once"
