"""How much memory there is, from what machine and cgroups say."""

from __future__ import annotations

from pathlib import Path

from bootseer.linux.cgroups import Memory, read_memory

MEMINFO = "MemTotal:       100 kB\nMemFree:         20 kB\nMemAvailable:    60 kB\nHugePages_Total:       0\n"


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


def test_this_machine_says_something() -> None:
    found = read_memory()
    assert 0 < found.free_bytes <= found.total_bytes
