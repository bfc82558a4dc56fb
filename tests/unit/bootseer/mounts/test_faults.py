"""What a mount could not read is in its journal before the reader has its error, whatever else is in the file."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from bootseer.mounts import faults
from bootseer.mounts.faults import Fault, Journal, read_faults


def test_faults_since_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "SAME_NS", 0)
    path = os.fspath(tmp_path / "journal")
    assert read_faults(path, 0) == []
    journal = Journal(path)
    journal.note("block 1:\n is  wrong", is_damage=True, blocks=[1, 2])
    middle_ns = time.monotonic_ns()
    journal.note("nothing came")
    journal.note("nothing came")
    first, *rest = read_faults(path, 0)
    assert first[1:] == ("block 1: is wrong", True, (1, 2), False) and first.at_ns < middle_ns
    assert [each[1:] for each in rest] == [("nothing came", False, (), False)] * 2
    assert read_faults(path, middle_ns) == rest
    assert os.stat(path).st_mode & 0o777 == 0o600


def test_the_same_words_are_not_written_at_each_read(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "journal")
    journal = Journal(path)
    for _ in range(100):
        journal.note("nothing came")
    assert len(read_faults(path, 0)) < 50


def test_a_journal_begins_again_when_it_is_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "MAX_FILE_BYTES", 5000)
    journal = Journal(os.fspath(tmp_path / "journal"))
    for number in range(200):
        journal.note(f"{number} " + "x" * 5000)
    assert (tmp_path / "journal").stat().st_size < 6000
    assert read_faults(os.fspath(tmp_path / "journal"), 0)[-1].why.startswith("199 ")


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"[" * 5000,
        b"{}",
        b"[1]",
        b'["1", "why", true, [], false]',
        b'[1, "why", 1, [], false]',
        b"null",
    ],
)
def test_what_is_no_fault_is_passed_over(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "journal"
    path.write_bytes(line + b"\n" + json.dumps(Fault(5, "why")).encode() + b"\n" + line)
    assert read_faults(os.fspath(path), 0) == [Fault(5, "why")]


def test_a_directory_that_is_not_there_costs_only_the_knowledge(tmp_path: Path) -> None:
    Journal(os.fspath(tmp_path / "none" / "journal")).note("nothing came")
    os.symlink(tmp_path / "elsewhere", tmp_path / "link")
    Journal(os.fspath(tmp_path / "link")).note("nothing came")
    assert not (tmp_path / "elsewhere").exists()
