"""Ranks never wait for bootrun: the scenarios of `python -m bench pressure`, shorter and smaller."""

from __future__ import annotations

import os
import statistics

import pytest

from bench import pressure
from tests.support import lacking

SECONDS = 3.0
FLOOD_BYTES = 200 * 10**6
# A rank that waited for bootrun would show a step as long as the disturbance, 2 s and more.
LONGEST_STEP_S = 1.0
MAX_RSS_BYTES = 100 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stopped", "unread", "flood"])
def test_ranks_go_on(name: str, tmp_path: os.PathLike[str]) -> None:
    check(name, os.fspath(tmp_path))


@pytest.mark.slow
@pytest.mark.system
def test_ranks_go_on_when_the_log_disk_is_full(tmp_path: os.PathLike[str]) -> None:
    if os.geteuid() != 0:
        lacking("mounting a small file system needs root")
    check("disk_full", os.fspath(tmp_path))


def check(name: str, directory: str) -> None:
    job = pressure.SCENARIOS[name](directory, SECONDS, FLOOD_BYTES)
    steps = job.steps()
    assert len(steps) > 100
    assert max(steps) < LONGEST_STEP_S
    assert statistics.median(steps) < 0.05
    assert job.peak_bytes < MAX_RSS_BYTES
