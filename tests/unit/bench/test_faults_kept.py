"""What --keep has kept of a run of `bench faults` is read back, and only for the same injection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.faults import PLAN, _as_record, read_kept
from bench.faults_judge import Outcome, judge
from bench.faults_plan import draw, read_faults
from bench.record import BenchError


def test_a_verdict_comes_back_for_the_same_injection_alone(tmp_path: Path) -> None:
    faults = read_faults(Path(PLAN).read_bytes(), PLAN)
    [injection, *_], [other, *_] = draw(faults, 1), draw(faults, 2)
    verdict = judge(injection, Outcome(left=2))
    path = tmp_path / "verdict.json"
    path.write_text(
        json.dumps({"injection": _as_record(injection), "verdict": verdict._asdict(), "outcome": {"left": 2}})
    )
    assert read_kept(str(path), injection) == (verdict, Outcome(left=2))
    with pytest.raises(BenchError, match="of another injection: take the same --seed"):
        read_kept(str(path), other)
    path.write_text("{}")
    with pytest.raises(BenchError, match="verdict"):
        read_kept(str(path), injection)
    with pytest.raises(BenchError, match="No such file"):
        read_kept(str(tmp_path / "none"), injection)
