"""The events of a running job: each whole line once, numbered, however the files grow."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.serve import event_log
from launcher.serve.event_log import EventLog


def line(name: str, run_id: str = "run7", wall_ns: int = 10**18, **more: Any) -> bytes:
    event = {
        "v": 1, "wall_ns": wall_ns, "mono_ns": 5, "run_id": run_id, "node": "a", "rank": None, "attempt": 0,
        "stage": None, "kind": "instant", "name": name, **more,
    }  # fmt: skip
    return json.dumps(event, separators=(",", ":")).encode()


def append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def names(log: EventLog, after: int = 0) -> list[str]:
    return [json.loads(event.line)["name"] for event in log.after(after)]


@given(cuts=st.lists(st.integers(0, 600), max_size=6))
@settings(max_examples=60, deadline=None)
def test_each_whole_line_is_seen_once_however_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    directory = tmp_path_factory.mktemp("events")
    data = b"".join(line(f"n{number}") + b"\n" for number in range(4)) + line("unfinished")
    log = EventLog(os.fspath(directory), "run7")
    begin = 0
    for end in (*sorted(min(cut, len(data)) for cut in cuts), len(data)):
        append(directory / "run.jsonl", data[begin:end])
        begin = end
        assert not log.poll()
    assert names(log) == ["n0", "n1", "n2", "n3"]
    assert [event.number for event in log.after(2)] == [3, 4]
    assert log.after(4) == log.after(99) == []


def test_what_is_no_event_of_the_run_is_skipped(tmp_path: Path) -> None:
    beat = line("heartbeat", kind="scalar", value=7)
    lines = (line("other", "run8"), line("old", wall_ns=5), b"{", b"\xff", b"", b"[" * 5000, b'{"v": 1}', beat)
    append(tmp_path / "agent-a.jsonl", b"\n".join((*lines, line("mine", stage="env"))) + b"\n")
    log = EventLog(os.fspath(tmp_path), "run7", since_ns=100)
    log.poll()
    assert names(log) == ["mine"]
    assert (log.skipped, log.counts) == (6, {("mine", "env"): 1})


def test_the_files_of_nodes_count_until_that_of_the_run_is_there(tmp_path: Path) -> None:
    append(tmp_path / "agent-a.jsonl", line("first") + b"\n")
    append(tmp_path / "rank-0-attempt-0-a.jsonl", line("second") + b"\n")
    log = EventLog(os.fspath(tmp_path), "run7")
    log.poll()
    assert names(log) == ["first", "second"]
    epoch = log.epoch
    append(tmp_path / "run.jsonl", b"".join(line(name) + b"\n" for name in ("first", "second", "third")))
    log.poll()
    assert names(log) == ["first", "second", "third"], "each once"
    assert log.epoch != epoch, "numbers of before mean nothing now"
    assert log.counts.total() == 3


def test_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_KEPT_LINES", 10)
    append(tmp_path / "run.jsonl", b"".join(line(f"n{number}") + b"\n" for number in range(25)))
    log = EventLog(os.fspath(tmp_path), "run7")
    log.poll()
    assert (log.first, log.last) == (16, 25)
    assert names(log, 3) == [f"n{number}" for number in range(15, 25)]
    monkeypatch.setattr(event_log, "MAX_KEPT_BYTES", 500)
    append(tmp_path / "run.jsonl", line("last") + b"\n")
    log.poll()
    assert names(log)[-1] == "last"
    assert sum(len(event.line) for event in log.after(0)) <= 500


def test_an_endless_line_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_LINE_BYTES", 1000)
    monkeypatch.setattr(event_log, "READ_BYTES", 400)
    log = EventLog(os.fspath(tmp_path), "run7")
    for data in (b"x" * 5000, b"x\n" + line("next") + b"\n"):
        append(tmp_path / "run.jsonl", data)
        log.poll()
    assert names(log) == ["next"]


def test_much_is_read_in_several_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "MAX_POLL_BYTES", 1000)
    append(tmp_path / "run.jsonl", b"".join(line(f"n{number}") + b"\n" for number in range(20)))
    log = EventLog(os.fspath(tmp_path), "run7")
    calls = 1
    while log.poll():
        calls += 1
    assert calls > 2
    assert names(log) == [f"n{number}" for number in range(20)]


def test_no_pipe_is_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "agent-a.jsonl")
    log = EventLog(os.fspath(tmp_path), "run7")
    log.poll()
    assert log.after(0) == []
