"""A fault of bench faults from end to end: injected, seen, judged, and everything gone afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import netns
from bench.faults import PLAN, Trial
from bench.faults_plan import draw, read_faults
from tests.support import lacking


@pytest.mark.system
def test_an_exit_is_seen_and_the_training_goes_on(tmp_path: Path) -> None:
    if reason := netns.why_not():
        lacking(reason)
    plan = draw(read_faults(Path(PLAN).read_bytes(), PLAN), 1)
    (exits,) = (each._replace(at_step=21) for each in plan if each.fault.name == "exit-1")
    [tried] = Trial(str(tmp_path), None).run_all([exits], ("bootrun",))
    verdict = tried.ours
    assert verdict.seen_s is not None and verdict.seen_s < 10
    assert verdict.culprit == f"rank {exits.rank}", verdict
    assert verdict.is_class_right, verdict
    assert verdict.action == "restart", verdict
    assert tried.outcome.left == 0
