"""SIGKILL of bootrun, its guard, and both at once: a few of the kills of `python -m bench kill`."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import kill
from bench.fork import children_of
from bench.kill_restart_job import find_cgroups
from tests import support

SEED = int(os.environ.get("KILL_SEED", "20261121"))


@pytest.mark.parametrize("victim", kill.VICTIMS)
def test_nothing_of_the_job_is_left(victim: str, tmp_path: os.PathLike[str]) -> None:
    chance = random.Random(f"{SEED} {victim}")
    for number in range(4):
        directory = os.path.join(tmp_path, str(number))
        os.mkdir(directory)
        left, _ = kill.kill_once(victim, chance.uniform(0.0, 0.5), directory)
        assert left == 0


@pytest.mark.leaks
def test_a_job_goes_on_without_its_watchdog_and_nothing_is_left(
    bootrun: support.Programs, script: Callable[..., str], tmp_path: Path
) -> None:
    source = """
import os, time
open(f"ready-{os.environ['RANK']}", "w").close()
while not os.path.exists("go"): time.sleep(0.005)
"""
    job = bootrun.start("--standalone", "--nproc-per-node", 2, "--log-dir", "logs", script(source))
    ready = [os.path.join(bootrun.dir, f"ready-{rank}") for rank in range(2)]
    support.wait_until(lambda: all(map(os.path.exists, ready)), 20, "the ranks run")
    [watchdog] = children_of(job.pid)
    os.kill(watchdog, signal.SIGKILL)
    # On a busy machine it is alive for a while: a job that ends meanwhile leaves the cgroup to it.
    support.wait_until(lambda: not support.is_running(watchdog), 20, "it is dead")
    Path(bootrun.dir, "go").touch()
    run = job.wait()
    assert run.status == 0, run.stderr
    support.wait_until(lambda: not find_cgroups({watchdog}), 20, "its cgroup is gone")
