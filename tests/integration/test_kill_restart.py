"""SIGKILL of a process of a job while it restarts: a few of the kills of `python -m bench kill_restart`."""

from __future__ import annotations

import os

import pytest

from bench.kill_restart_job import try_kill
from bench.kill_restart_plan import UNCLEAR, draw

SEED = int(os.environ.get("KILL_SEED", "20261125"))


@pytest.mark.leaks
@pytest.mark.parametrize("target", ["agent0", "guard1", "coordinator", "fork_server"])
def test_it_goes_on_or_says_why_and_nothing_is_left(target: str, tmp_path: os.PathLike[str]) -> None:
    [kill] = draw(SEED, 1, [target])
    kill = kill._replace(mode="replaced" if kill.mode == "replaced" else "elastic")  # none that waits for a node
    directories = [os.path.join(tmp_path, name) for name in ("job", "cache")]
    for directory in directories:
        os.mkdir(directory)
    came = try_kill(kill, "bare", *directories)
    assert (came.verdict != UNCLEAR, came.wrong, came.left) == (True, "", ()), f"{kill}\n{came.text}"
