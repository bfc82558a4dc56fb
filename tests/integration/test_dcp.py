"""FSDP states through real gloo jobs: saved on four ranks, loaded on one, two and four, also by torch's reader."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import Programs

RANKS = os.path.join(os.path.dirname(__file__), "dcp_ranks.py")
QUIET = {"OMP_NUM_THREADS": "1"}


def run(bootrun: Programs, nproc: int, *words: str | Path) -> str:
    done = bootrun("--standalone", "--nproc-per-node", nproc, RANKS, *words, env=QUIET, deadline_s=90)
    assert done.status == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.slow
def test_saved_on_four_ranks_and_loaded_on_any_number(
    bootrun: Programs, program: Programs, tmp_path: Path
) -> None:
    ckpt, reference = tmp_path / "ckpt", tmp_path / "reference.pt"
    run(bootrun, 4, "save", ckpt, reference, "2")
    versions = [name for name in os.listdir(ckpt) if name.startswith("v-")]
    assert len(versions) == 2
    for nproc in (4, 2, 1):
        assert "equal" in run(bootrun, nproc, "load", ckpt, reference)
    bootseer = os.path.join(os.path.dirname(bootrun.prefix[0]), "bootseer")
    done = program(bootseer, "ckpt", "unstripe", ckpt, tmp_path / "plain")
    assert done.status == 0, done.stderr
    assert {name for name in os.listdir(tmp_path / "plain") if name.endswith(".distcp")} == {
        f"__{rank}_0.distcp" for rank in range(4)
    }
    assert "equal" in run(bootrun, 2, "load", tmp_path / "plain", reference, "torch")
    assert "equal" in run(bootrun, 2, "load", tmp_path / "plain", reference)  # ours reads torch's layout


def test_saved_on_two_ranks_and_loaded_on_two_and_on_one(bootrun: Programs, tmp_path: Path) -> None:
    run(bootrun, 2, "save", tmp_path / "ckpt", tmp_path / "reference.pt")
    for nproc in (2, 1):
        assert "equal" in run(bootrun, nproc, "load", tmp_path / "ckpt", tmp_path / "reference.pt")
