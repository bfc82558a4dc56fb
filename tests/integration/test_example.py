"""The example under both launchers: a rank dies, the job resumes, and the result is the same as without it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from tests import support

TRAIN = os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(__file__))), "examples", "train.py")
SMALL = ("--steps", 9, "--save-every", 4, "--batch", 2, "--width", 16, "--layers", 1, "--context", 480)
RESTARTS = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 1)
JOB = (*RESTARTS, TRAIN, *SMALL, "--print-every", 5, "--checkpoints")
ENV = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
DIES = ("--die-rank", 1, "--die-at-step", 6)


def final_loss(run: support.Run) -> str:
    assert run.status == 0, run.stdout + run.stderr
    (loss,) = re.findall(r"^final loss (\S+)", run.stdout, re.MULTILINE)
    return loss


@pytest.fixture(scope="module")
def undisturbed_loss(tmp_path_factory) -> Iterator[str]:
    """Of the job in which no rank dies."""
    directory = tmp_path_factory.mktemp("whole")
    programs = support.Programs(os.fspath(directory), [support.BOOTRUN])
    whole = programs(*JOB, directory / "checkpoints", env=ENV, deadline_s=90)
    assert "resumed" not in whole.stdout
    yield final_loss(whole)
    programs.close()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["bootrun", "torchrun"])
def test_restart_changes_nothing(request, undisturbed_loss: str, tmp_path, launcher: str) -> None:
    launch = request.getfixturevalue(launcher)
    broken = launch(*JOB, tmp_path / "broken", *DIES, env=ENV, deadline_s=90)
    assert re.findall(r"resumed from step (\d+)", broken.stdout) == ["4"]
    assert final_loss(broken) == undisturbed_loss
    shown = re.findall(r"^step +5  loss (\S+)", broken.stdout, re.MULTILINE)
    assert len(shown) == 2, "before and after the restart, from 5 steps and from 1"
    assert all(abs(float(each) - float(undisturbed_loss)) < 1 for each in shown), shown
    assert sorted(os.listdir(tmp_path / "broken")) == ["step_000008.pt", "step_000009.pt"]


@pytest.mark.slow
def test_missed_target_fails(bootrun, tmp_path) -> None:
    job = ("--standalone", "--nproc-per-node", 2, TRAIN, *SMALL, "--checkpoints", tmp_path / "checkpoints")
    run = bootrun(*job, "--target-loss", 0.5, env={"OMP_NUM_THREADS": "1"}, deadline_s=60)
    assert run.status == 1
    assert "the final loss is above 0.5" in run.stdout
