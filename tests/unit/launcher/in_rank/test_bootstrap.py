"""Parts of launcher/in_rank/bootstrap.py that need no process of their own; the rest is in tests/integration."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.events import read_events
from launcher.in_rank import bootstrap as inside


class Disk:
    """Stands in for io.FileIO: takes `room` bytes."""

    def __init__(self, room: int, number: int = errno.ENOSPC) -> None:
        self.room = room
        self.number = number
        self.data = b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(self.number, "no")
        taken = bytes(data)[: self.room]
        self.room -= len(taken)
        self.data += taken
        return len(taken)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_counted_and_forgotten(tmp_path: Path, number: int) -> None:
    path = os.fspath(tmp_path / "events")
    disk = inside._make_file_type(Disk, inside.Events(path, "r", "n", 0, 0), [])(7, number)
    assert disk.write(b"12345") == 5
    assert disk.write(b"6789") == 4
    assert disk.write(memoryview(b"12345678").cast("I")) == 8
    assert disk.data == b"1234567"
    disk.room = 3
    assert disk.write(b"abc") == 3
    lost = [event for event in read_events(path) if event.name == "output_lost"]
    assert [(event.value, event.unit) for event in lost] == [(2, "bytes")]


def test_other_errors_are_raised() -> None:
    disk = inside._make_file_type(Disk, inside.Events("", "r", "n", 0, 0), [])(0, errno.EIO)
    with pytest.raises(OSError, match="no"):
        disk.write(b"x")


@given(st.text())
def test_quoting_is_json(text: str) -> None:
    line = inside.quote(text).encode("utf-8", "backslashreplace")
    assert json.loads(line) == text


@pytest.mark.parametrize("value", [1, -1, 2**70, 1.5, 1e300, True, False, "text", 'a"\n', ""])
def test_values_keep_their_kind(value: object) -> None:
    found = json.loads(inside.plain_value(value))
    assert (found, type(found)) == (value, type(value))


def test_other_values_are_not_looked_at() -> None:
    assert [inside.plain_value(value) for value in (None, [1], float("nan"), float("inf"))] == ["null"] * 4


def test_lines_are_events(tmp_path: Path) -> None:
    path = os.fspath(tmp_path / "events")
    events = inside.Events(path, 'r"un', "nö", 3, 4)
    events.write("import", "begin", "torch", ',"span":"torch"')
    events.write(None, "scalar", "x", ',"value":2.5')
    found = list(read_events(path))
    assert [(e.run_id, e.node, e.rank, e.attempt, e.stage, e.kind, e.name, e.span, e.value) for e in found] == [
        ('r"un', "nö", 3, 4, "import", "begin", "torch", "torch", None),
        ('r"un', "nö", 3, 4, None, "scalar", "x", None, 2.5),
    ]
