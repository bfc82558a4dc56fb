"""What bench faults takes for right, and how long it waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import bench
from bench.faults import Tried, add_figures, choose, table
from bench.faults_inside import WAYS as INSIDE
from bench.faults_judge import ACTION_S, QUIET_S, Outcome, hang_limit_s, is_exit, is_settled, judge, wait_s
from bench.faults_outside import WAYS as OUTSIDE
from bench.faults_plan import Fault, Injection, draw, read_faults
from bench.faults_said import Word
from bench.record import BenchError, Figures

PLAN = draw(read_faults((Path(bench.__file__).parent / "faults.toml").read_bytes(), "faults.toml"), 1)


def injection(**changes: object) -> Injection:
    values = {
        "name": "x",
        "what": "y",
        "where": "rank",
        "by": "script",
        "do": "exit",
        "first": "later",
        "class_": "user",
        "culprit": "rank",
        "action": "restart",
    }
    return Injection(Fault(**{**values, **changes}), 0.05, 1, 3, 30, 0.5)  # type: ignore[arg-type]


HARMLESS = injection(class_="", culprit="", action="")
HANG = injection(class_="hang", action="report", do="sleep")


def word(at_s: float, class_: str = "", ranks: tuple[int, ...] = (), nodes: tuple[str, ...] = ()) -> Word:
    return Word(at_s, class_, ranks, nodes, "what was said")


def test_every_fault_of_the_plan_can_be_done() -> None:
    assert {each.fault.do for each in PLAN if each.fault.by == "script"} <= set(INSIDE)
    assert {each.fault.do for each in PLAN if each.fault.by == "outside"} == set(OUTSIDE)


def test_all_right() -> None:
    words = (word(0.1, ranks=(0,)), word(0.3, "user", (3,)))
    found = judge(injection(), Outcome(words, goes_on_s=1.5))
    assert (found.is_right, found.seen_s, found.culprit) == (True, 0.1, "rank 3")
    assert found.is_class_right and found.is_culprit_right and found.is_action_right
    assert found.goes_on_s == 1.5


@pytest.mark.parametrize(
    ("words", "class_is", "culprit_is"),
    [
        ((word(0.1, ranks=(3,)),), False, True),  # no class was named
        ((word(0.1, "network", (3,)), word(0.2, "user", (3,))), False, True),  # too late
        ((word(0.1, "user", (2,)), word(0.2, "user", (3,))), True, False),
        ((word(0.1, "user", (2, 3)),), True, False),
        ((word(0.1, "user"), word(0.2, "hang", (3,))), True, True),
        ((), False, False),
    ],
)
def test_the_first_that_is_named_counts(words: tuple[Word, ...], class_is: bool, culprit_is: bool) -> None:
    found = judge(injection(), Outcome(words))
    assert (found.is_class_right, found.is_culprit_right) == (class_is, culprit_is)
    assert not found.is_action_right


def test_a_word_before_the_fault_is_no_word_about_it() -> None:
    found = judge(injection(), Outcome((word(-3.0, "user", (3,)),)))
    assert (found.is_right, found.is_class_right, found.is_culprit_right) == (False, False, False)
    assert "said before" in found.note


@pytest.mark.parametrize(
    ("culprit", "given", "is_right"),
    [
        ("node", word(1, "node", nodes=("node2",)), True),
        ("node", word(1, "node", nodes=("node1",)), False),
        ("node", word(1, "slow", (2, 3)), True),
        ("node", word(1, "slow", (3,)), False),
        ("job", word(1, "user", (0, 1, 2, 3)), True),
        ("job", word(1, "user", (0,)), False),
        ("job", word(1, "user"), True),
        ("rank", word(1, "user"), False),
    ],
)
def test_culprits(culprit: str, given: Word, is_right: bool) -> None:
    assert judge(injection(culprit=culprit), Outcome((given,))).is_culprit_right == is_right


def test_a_job_wide_fault_that_is_not_seen_blames_nobody_rightly() -> None:
    assert not judge(injection(culprit="job"), Outcome()).is_culprit_right


@pytest.mark.parametrize(
    ("wanted", "outcome", "is_right"),
    [
        ("restart", Outcome((word(1),), goes_on_s=2), True),
        ("restart", Outcome((word(1),), ended_s=2), False),
        ("exclude", Outcome((word(1),), goes_on_s=2, nodes_after=1), True),
        ("exclude", Outcome((word(1),), goes_on_s=2), False),
        ("give-up", Outcome((word(1),), ended_s=2), True),
        ("give-up", Outcome((word(1),), goes_on_s=2), False),
        ("give-up", Outcome((word(1),), goes_on_s=2, ended_s=9), True),
        ("restart", Outcome((word(1),), goes_on_s=2, ended_s=9), False),
        ("report", Outcome((word(1),)), True),
        ("report", Outcome((word(1),), goes_on_s=2), False),
        ("report", Outcome(), False),
    ],
)
def test_actions(wanted: str, outcome: Outcome, is_right: bool) -> None:
    assert judge(injection(action=wanted), outcome).is_action_right == is_right


@pytest.mark.parametrize(
    ("outcome", "is_right"),
    [
        (Outcome(steps_after=100), True),
        (Outcome(), False),  # it stands
        (Outcome((word(4, "hang"),), steps_after=100), False),
        (Outcome((word(-4, "hang"),), steps_after=100), False),
        (Outcome(steps_after=100, ended_s=9), False),
        (Outcome(steps_after=100, goes_on_s=9), False),
    ],
)
def test_of_harmless_ones_nothing_may_be_said(outcome: Outcome, is_right: bool) -> None:
    found = judge(HARMLESS, outcome)
    assert found.is_right == is_right
    assert is_right or found.note


@given(st.floats(0, 300), st.floats(0, 2000))
@example(0.0, 15.0)
@example(0.0, 16.0)
@example(10.0, 30.1)
def test_hangs_are_in_time_by_the_gaps_before(gap_s: float, seen_s: float) -> None:
    found = judge(HANG, Outcome((word(seen_s, "hang", (3,)),), longest_gap_s=gap_s))
    assert found.is_in_time == (seen_s <= hang_limit_s(gap_s))
    assert wait_s(HANG, gap_s) > hang_limit_s(gap_s) + 4, "one that comes late is still heard"


def test_when_nothing_more_is_waited_for() -> None:
    seen = (word(1.0, "user", (3,)),)
    assert not is_settled(injection(), Outcome(), 39)
    assert is_settled(injection(), Outcome(), 41)
    assert not is_settled(injection(), Outcome(), 119, 120.0)
    assert is_settled(injection(), Outcome(), 121, 120.0)
    assert is_settled(HARMLESS, Outcome(steps_after=9), 31, 120.0)
    assert not is_settled(injection(), Outcome(seen), 41)
    assert is_settled(injection(), Outcome(seen, goes_on_s=2.0), 2.1)
    assert is_settled(injection(), Outcome(seen), 1 + ACTION_S)
    assert is_settled(HANG, Outcome((word(17.0, "hang"),)), 17 + QUIET_S)
    assert not is_settled(HANG, Outcome((word(17.0, "hang"),)), 17 + QUIET_S - 1)
    assert is_settled(HARMLESS, Outcome(seen, steps_after=9), 31)
    assert not is_settled(HARMLESS, Outcome(seen, steps_after=9), 29)
    assert is_settled(HANG, Outcome(ended_s=1.0), 1.0)


@given(st.sampled_from(PLAN), st.floats(0, 120), st.floats(0, 60))
def test_each_injection_comes_to_an_end(one: Injection, gap_s: float, at_s: float) -> None:
    for words in ((), (word(at_s, "user"),)):
        outcome = Outcome(words, longest_gap_s=gap_s)
        assert is_settled(one, outcome, wait_s(one, gap_s) + at_s + ACTION_S)
    assert 0 < wait_s(one, gap_s) < 1000


def test_figures_tell_held_out_ones_apart() -> None:
    right = judge(injection(), Outcome((word(0.5, "user", (3,)),), goes_on_s=2))
    wrong = judge(injection(), Outcome((word(1.5, "network", (2,)),)))
    held = injection(is_held_out=True)
    tried = [
        Tried(injection(), right, Outcome(), None),
        Tried(held, wrong, Outcome(left=2), judge(held, Outcome())),
        Tried(HANG, judge(HANG, Outcome((word(30, "hang", (3,)),))), Outcome(), None),
        Tried(HARMLESS, judge(HARMLESS, Outcome(steps_after=1)), Outcome(), None),
    ]
    figures = Figures()
    add_figures(figures, tried)
    values = {name.removeprefix("faults."): made.value for name, made in figures}
    assert values["seen_share"] == 1
    assert values["class_right_share"] == pytest.approx(2 / 3)
    assert values["class_right_share_held_out"] == 0
    assert values["exit_detect_s"] == 1.5
    assert values["hang_detect_share"] == 0
    assert values["torchrun_seen_share"] == 0
    assert values["left_processes"] == 2
    text = "\n".join(table(tried))
    assert "network, not: user" in text and "no in 120 s" in text and "x@0.05 *" in text


def test_what_is_asked_for() -> None:
    class Args:
        only = ("exit-*", "autotune*")
        cadence = 0.05
        held_out = not_held_out = False
        limit: int | None = None

    names = {each.fault.name for each in choose(PLAN, Args())}  # type: ignore[arg-type]
    assert names == {"exit-1", "exit-77", "autotune", "autotune-one"}
    Args.held_out = True
    assert {each.fault.name for each in choose(PLAN, Args())} == {"exit-77", "autotune-one"}  # type: ignore[arg-type]
    Args.only = ("nothing",)
    with pytest.raises(BenchError, match="no fault is called so"):
        choose(PLAN, Args())  # type: ignore[arg-type]


def test_ends_are_what_ends_a_process() -> None:
    names = {each.fault.name for each in PLAN if is_exit(each)}
    assert {"exit-1", "kill-9", "oom-kill", "ecc", "bus"} <= names
    assert not names & {"stopped", "node-killed", "link-gone", "slow-rank", "nan", "link-3-s"}
