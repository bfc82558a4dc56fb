"""How many processors there are for this process: what it may run on, and what cgroups leave of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.linux.cgroups import parse_quota, usable_cores

V2 = "sys/fs/cgroup/job.slice"


@pytest.fixture(autouse=True)
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors to run on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def lay(root: Path, contents: dict[str, str]) -> str:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return os.fspath(root)


def test_without_cgroups_it_is_where_the_process_may_run(tmp_path: Path) -> None:
    assert usable_cores(lay(tmp_path, {})) == 8
    assert usable_cores(lay(tmp_path, {"proc/self/cgroup": "0::/gone\n\nrubbish\n7:cpu\n"})) == 8


@pytest.mark.parametrize(
    ("inner", "outer", "cores"),
    [
        ("max 100000\n", "max 100000\n", 8),
        ("max 100000\n", "400000 100000\n", 4),
        ("200000 100000\n", "400000 100000\n", 2),
        ("250000 100000\n", "max 100000\n", 3),  # the half of a processor is not given away
        ("5000 100000\n", "max 100000\n", 1),
        ("6400000 100000\n", "max 100000\n", 8),
        ("", "rubbish\n", 8),
    ],
)
def test_cgroup_v2_the_tightest_level_counts(tmp_path: Path, inner: str, outer: str, cores: int) -> None:
    files = {"proc/self/cgroup": "0::/job.slice/step.scope\n"}
    files |= {f"{V2}/step.scope/cpu.max": inner, f"{V2}/cpu.max": outer}
    assert usable_cores(lay(tmp_path, files)) == cores


@pytest.mark.parametrize("mount", ["sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/cpu"])
@pytest.mark.parametrize(("quota", "cores"), [("150000\n", 2), ("-1\n", 8)])
def test_cgroup_v1_also_where_the_container_sees_only_its_own(
    tmp_path: Path, mount: str, quota: str, cores: int
) -> None:
    files = {"proc/self/cgroup": "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n"}
    files |= {f"{mount}/cpu.cfs_quota_us": quota, f"{mount}/cpu.cfs_period_us": "100000\n"}
    assert usable_cores(lay(tmp_path, files)) == cores


@pytest.mark.parametrize("text", ["", "1", "1 2 3", "0 100000", "100000 0", "-1 100000", "1e5 1e5", "\u0661 1"])
def test_what_is_no_limit(text: str) -> None:
    assert parse_quota(text) == []


def test_this_machine_says_something() -> None:
    assert 1 <= usable_cores() <= 8
