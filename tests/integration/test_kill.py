"""SIGKILL of bootrun, its guard, and both at once: a few of the kills of `python -m bench kill`."""

from __future__ import annotations

import os
import random

import pytest

from bench import kill

SEED = int(os.environ.get("KILL_SEED", "20261121"))


@pytest.mark.parametrize("victim", kill.VICTIMS)
def test_nothing_of_the_job_is_left(victim: str, tmp_path: os.PathLike[str]) -> None:
    chance = random.Random(f"{SEED} {victim}")
    for number in range(4):
        folder = os.path.join(tmp_path, str(number))
        os.mkdir(folder)
        left, _ = kill.kill_once(victim, chance.uniform(0.0, 0.5), folder)
        assert left == 0
