"""The job's own cgroup: of no other job, and gone when it ends."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator

import pytest

from launcher.supervisor import cgroup
from tests.support import lacking

pytestmark = pytest.mark.system


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    path = cgroup.make()
    if path is None:
        lacking("no cgroup v2 can be made here")
    yield path
    cgroup.remove(path)


def test_another_job_of_the_same_number_has_one_of_its_own(made: str) -> None:
    """In two PID namespaces two sentinels have the same number; neither guard may have entered yet."""
    other = cgroup.make()
    assert other is not None and other != made
    with subprocess.Popen(["sleep", "60"]) as process:
        assert cgroup._write(f"{made}/cgroup.procs", str(process.pid).encode())
        cgroup.remove(other)
        assert not os.path.exists(other)
        assert process.poll() is None
        process.kill()


def test_it_goes_with_what_is_in_it(made: str) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert cgroup._write(f"{made}/cgroup.procs", str(process.pid).encode())
        cgroup.remove(made)
        assert not os.path.exists(made)
        assert process.wait(10) == -9


def test_empty_ones_of_killed_jobs_go_with_the_next(made: str) -> None:
    left, busy, young, own, other = (
        f"{made}/{name}" for name in ("bootseer-1-a", "bootseer-2-b", "bootseer-3-c", "bootseer-4-d", "else")
    )
    old_s = time.time() - cgroup.OLD_S - 1.0
    for path in (left, busy, young, own, other):
        os.mkdir(path)
        os.utime(path, None if path == young else (old_s, old_s))
    with subprocess.Popen(["sleep", "60"]) as process:
        assert cgroup._write(f"{busy}/cgroup.procs", str(process.pid).encode())
        cgroup.remove_left(own)
        assert [os.path.exists(path) for path in (left, busy, young, own, other)] == [
            False,
            True,
            True,
            True,
            True,
        ]
        assert process.poll() is None
        process.kill()
    for path in (busy, young, own, other):
        cgroup.remove(path)
