"""How much memory an arena may take, from what machine and cgroups say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint import capacity
from bootseer.checkpoint.capacity import ARENA, DIRECT, Capacity, Memory, allowed, decide, parse_bytes, read_memory
from bootseer.errors import UsageError

GIB = 1 << 30
MEMINFO = "MemTotal:       100 kB\nMemFree:         20 kB\nMemAvailable:    60 kB\nHugePages_Total:       0\n"


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
    room = Capacity(GIB, "1.0 GiB, a quarter of what the machine has")
    assert decide(GIB, True, room).name == ARENA
    assert decide(GIB + 1, False, room).name == ARENA
    refused = decide(GIB + 1, True, room)
    assert refused.name == DIRECT and "--checkpoint-memory" in refused.reason
    assert decide(1, False, Capacity(0, "as --checkpoint-memory says")).name == DIRECT


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


def lay(root: Path, **contents: str) -> None:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_the_machine_alone(tmp_path: Path) -> None:
    lay(tmp_path, **{"proc/meminfo": MEMINFO})
    assert read_memory(str(tmp_path)) == Memory(100 << 10, 60 << 10, "the machine")


def test_cgroup_v2_the_tightest_level_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/job.slice"
    lay(tmp_path, **{
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/job.slice/step.scope\n",
        f"{group}/step.scope/memory.max": "max\n", f"{group}/step.scope/memory.high": "max\n",
        f"{group}/memory.max": "40960\n", f"{group}/memory.high": "max\n", f"{group}/memory.current": "30720\n",
        f"{group}/memory.stat": "anon 5\ninactive_file 10240\n",
    })  # fmt: skip
    found = read_memory(str(tmp_path))
    assert found[:2] == (40960, 20480) and found.limited_by.endswith("job.slice")
    lay(tmp_path, **{f"{group}/memory.high": "20480\n"})
    assert read_memory(str(tmp_path))[:2] == (20480, 0)


def test_cgroup_v1_also_where_the_container_sees_only_its_own(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    lay(tmp_path, **{
        "proc/meminfo": MEMINFO, "proc/self/cgroup": "5:cpu,memory:/docker/abc\n1:name=systemd:/x\n",
        f"{mount}/memory.limit_in_bytes": "51200\n", f"{mount}/memory.usage_in_bytes": "51200\n",
        f"{mount}/memory.stat": "total_inactive_file 1024\n",
    })  # fmt: skip
    assert read_memory(str(tmp_path))[:2] == (51200, 1024)
    lay(tmp_path, **{f"{mount}/memory.limit_in_bytes": "9223372036854771712\n"})
    assert read_memory(str(tmp_path)).limited_by == "the machine"


def test_nothing_known_is_nothing_taken(tmp_path: Path) -> None:
    assert allowed(read_memory(str(tmp_path))).bytes == 0
    assert capacity.format_bytes(0) == "0 bytes"


def test_this_machine_says_something() -> None:
    found = read_memory()
    assert 0 < found.free_bytes <= found.total_bytes
