"""The faults that are injected: what the file may say, and that a seed gives the same plan each time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import bench
from bench.faults_plan import NODES, RANKS_OF_NODE, draw, read_faults
from bench.record import BenchError

TEXT = (Path(bench.__file__).parent / "faults.toml").read_bytes()
FAULTS = read_faults(TEXT, "faults.toml")
ONE = """
[[fault]]
name = "x"
what = "y"
where = "rank"
by = "script"
do = "exit"
first = "later"
class = "user"
culprit = "rank"
action = "restart"
"""


def test_there_are_enough_of_each_kind() -> None:
    assert len(FAULTS) >= 40
    assert sum(fault.is_held_out for fault in FAULTS) >= 10
    assert sum(fault.is_harmless for fault in FAULTS) >= 6
    assert {step_s for fault in FAULTS for step_s in fault.steps} == {0.05, 2.0, 15.0}
    held_out = {fault.class_ for fault in FAULTS if fault.is_held_out}
    assert {"hang", "user", "slow", "numeric", ""} <= held_out


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"user"', '"misc"', "Invalid enum value 'misc'"),
        ('"restart"', '""', "empty together"),
        ('first = "later"', 'first = "later"\nsteps = [1.0]', "steps are of"),
        ('where = "rank"', 'where = "job"', "no culprit but the job"),
        ('do = "exit"', 'do = "exit"\nwhen = 1', "unknown field `when`"),
        ("[[fault]]", "[[fault]", "faults.toml"),
    ],
)
def test_what_cannot_be(old: str, new: str, words: str) -> None:
    with pytest.raises(BenchError, match=words):
        read_faults(ONE.replace(old, new, 1), "faults.toml")


def test_a_name_is_there_once() -> None:
    with pytest.raises(BenchError, match="x is there twice"):
        read_faults(ONE + ONE, "faults.toml")


@given(st.integers(0, 1 << 32))
def test_a_seed_is_a_plan(seed: int) -> None:
    plan = draw(FAULTS, seed)
    assert plan == draw(FAULTS, seed)
    assert [each for each in plan if each.fault is FAULTS[-1]] == draw(FAULTS[-1:], seed)
    assert len({each.key for each in plan}) == len(plan)
    for each in plan:
        assert 0 <= each.node < NODES
        assert (each.rank >= 0) == (each.fault.where == "rank")
        assert each.rank < 0 or each.node == each.rank // RANKS_OF_NODE
        assert each.fault.first != "later" or each.at_step >= 4
        assert each.at_step * each.step_s <= 150 or each.at_step == 20


def test_seeds_differ() -> None:
    assert len({tuple((each.rank, each.at_step) for each in draw(FAULTS, seed)) for seed in range(8)}) == 8
