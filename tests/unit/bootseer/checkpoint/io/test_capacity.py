"""How much memory an arena may take, from what machine and cgroups say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.io import capacity
from bootseer.checkpoint.io.capacity import ARENA, DIRECT, Capacity, allowed, decide, parse_bytes
from bootseer.errors import UsageError
from bootseer.linux.cgroups import Memory, read_memory

GIB = 1 << 30


def test_a_quarter_by_default_and_never_more_than_is_free() -> None:
    machine = Memory(64 * GIB, 60 * GIB, "the machine")
    assert allowed(machine).bytes == 16 * GIB
    assert allowed(machine, "40G").bytes == 40 * GIB
    tight = Memory(64 * GIB, 8 * GIB, "the machine")
    assert allowed(tight).bytes == 7 * GIB and "free" in allowed(tight).reason
    assert allowed(tight, "40G").bytes == 7 * GIB
    assert allowed(tight, held_bytes=32 * GIB).bytes == 16 * GIB  # what the arena has already is its own
    assert allowed(machine, "0").bytes == 0


@given(st.integers(0, 1 << 45), st.integers(0, 1 << 45), st.integers(0, 1 << 45))
def test_never_more_than_there_is(total: int, free: int, held: int) -> None:
    found = allowed(Memory(total, min(total, free), "x"), "", min(held, total)).bytes
    assert 0 <= found <= total // 4


def test_modes_and_their_reasons() -> None:
    room = Capacity(GIB, "1.0 GiB, a quarter of the memory of the machine")
    assert decide(GIB, True, room).name == ARENA
    assert decide(GIB + 1, False, room).name == ARENA
    refused = decide(GIB + 1, True, room)
    assert refused.name == DIRECT and "--checkpoint-memory" in refused.reason
    assert decide(1, False, Capacity(0, "as set by --checkpoint-memory")).name == DIRECT


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("4096", 4096), ("512M", 512 << 20), ("16GiB", 16 * GIB), ("16gb", 16 * GIB), ("1.5K", 1536),
     (" 2t ", 2 << 40)],
)  # fmt: skip
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "G", "1X", "-1", "nan", "inf", "1e99", "1 2"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_bytes(text)


def test_nothing_known_is_nothing_taken(tmp_path: Path) -> None:
    assert allowed(read_memory(str(tmp_path))).bytes == 0
    assert capacity.format_bytes(0) == "0 bytes"
