"""The rules of a node over the lines of its ranks: what is found, and what is switched off."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.rules.clocks import ANY_RANK
from launcher.rules.engine import (
    EVERYTHING_LINES,
    MAX_LINE_CHARACTERS,
    MAX_RANKS_REPORTED,
    MIN_JUMP_VALUES,
    DisabledRule,
    MetricCheck,
    MetricValue,
    Outcome,
    RuleEngine,
    RuleFinding,
    RuleMatch,
    parse_number,
)
from launcher.rules.rule import Rule

FATAL = Rule("fatal", "FATAL")
LOSS = Rule("loss", r"loss[=: ]+(?P<loss>\S+)", metric="loss", must_be_finite=True)


def engine_of(*rules: Rule, ranks: int = 2, world_size: int | None = None) -> RuleEngine:
    return RuleEngine(rules, range(ranks), ranks if world_size is None else world_size, 0.0)


def found(outcomes: list[Outcome]) -> list[tuple[str, int]]:
    return [(each.rule.name, each.rank) for each in outcomes if isinstance(each, RuleFinding)]


def test_an_alarm_is_reported_once_for_each_rank_with_its_line() -> None:
    engine = engine_of(FATAL)
    (told,) = engine.read(1, ["all is well", "FATAL: \x1b[31mno more\x07 "], 1.0)
    assert told == RuleFinding(FATAL, 1, r"'FATAL: \x1b[31mno more\x07'")
    assert engine.read(1, ["FATAL: again"], 2.0) == []
    assert found(engine.read(0, ["a FATAL error"], 2.0)) == [("fatal", 0)]


def test_few_ranks_are_reported_of() -> None:
    engine = engine_of(FATAL, ranks=9)
    told = [outcome for rank in range(9) for outcome in engine.read(rank, ["FATAL"], 1.0)]
    assert len(told) == MAX_RANKS_REPORTED


def test_only_the_ranks_that_it_is_about() -> None:
    engine = engine_of(FATAL._replace(ranks="last"))
    assert engine.read(0, ["FATAL"], 1.0) == []
    assert found(engine.read(1, ["FATAL"], 1.0)) == [("fatal", 1)]
    assert not engine_of(FATAL._replace(ranks="last"), world_size=8).wants_lines


def test_a_value_that_is_no_finite_number() -> None:
    engine = engine_of(LOSS)
    assert engine.read(0, ["step 1 loss=2.5,", "step 2 loss=2.25"], 1.0) == [MetricValue(LOSS, 0, 2.25)]
    told = engine.read(0, ["step 3 loss=nan"], 2.0)
    assert told[0] == RuleFinding(LOSS, 0, "loss is nan: 'step 3 loss=nan'")
    assert isinstance(told[1], MetricValue) and math.isnan(told[1].value)
    assert found(engine.read(1, ["loss: -inf"], 2.0)) == [("loss", 1)]


def test_what_is_no_number_is_reported_once_and_changes_nothing() -> None:
    engine = engine_of(LOSS._replace(action="restart"))
    (told,) = engine.read(0, ["loss=high", "loss=higher"], 1.0)
    assert isinstance(told, RuleFinding)
    assert (told.rule.action, told.rank, told.why) == ("report", ANY_RANK, "'high' is no number: 'loss=high'")


@pytest.mark.parametrize(
    ("changes", "values", "why"),
    [
        ({"must_be_below": 10.0}, [9.9, 10.0], "loss is 10, and must be below 10"),
        ({"must_be_below": 10.0}, [math.nan], "loss is nan, and must be below 10"),
        ({"must_be_above": 0.0}, [0.1, -1.0], "loss is -1, and must be above 0"),
        ({"must_be_above": 0.0, "times": 3}, [-1, -1, 1, -1, -1, -1], "loss is -1, and must be above 0, 3 times"),
        ({"must_not_jump": 5.0}, [2.0] * MIN_JUMP_VALUES + [10.1], "loss is 10.1: more than 5 times its usual 2"),
    ],
)
def test_bounds(changes: dict[str, float], values: list[float], why: str) -> None:
    judge = MetricCheck(LOSS._replace(must_be_finite=False, **changes))  # type: ignore[arg-type]
    *before, last = [judge.look(value) for value in values]
    assert not any(before)
    assert last.startswith(why)


@pytest.mark.parametrize(
    "values", [[2.0] * 7 + [1e9], [2.0] * 40 + [9.9], [0.0] * 40 + [1.0], [4.0, 3.0, 2.0] * 20]
)
def test_no_jump(values: list[float]) -> None:
    judge = MetricCheck(LOSS._replace(must_not_jump=5.0))
    assert not any(judge.look(value) for value in values)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2.5", 2.5),
        ("1e-3,", 1e-3),
        ("1,024.5", 1024.5),
        ("85%", 85.0),
        ("'inf'", math.inf),
        ("[3]", 3.0),
        ("2.", 2.0),
    ],
)
def test_numbers(text: str, value: float) -> None:
    assert parse_number(text) == value
    assert parse_number("x" + text) is None
    assert parse_number("") is None


def test_start_and_stop() -> None:
    engine = engine_of(FATAL._replace(start="begin", stop="end"))
    assert engine.read(0, ["FATAL", "begin", "end", "FATAL"], 1.0) == []
    assert found(engine.read(0, ["begin", "FATAL"], 2.0)) == [("fatal", 0)]
    assert engine.read(1, ["FATAL"], 2.0) == [], "that is another rank's"


def test_lines_that_must_come() -> None:
    rule = Rule("step", "step", must_start_within_s=5.0, must_recur_within_s=3.0)
    engine = engine_of(rule)
    engine.read(0, ["step 1"], 4.0)
    assert found(engine.tick(5.0)) == [("step", 1)]
    assert found(engine.tick(7.0)) == [("step", 0)]
    assert engine.tick(100.0) == []
    engine.read(0, ["step 2"], 101.0)
    assert found(engine.tick(104.0)) == [("step", 0)], "told again, as it had come again"
    engine.read(0, ["step 3"], 105.0)
    assert engine.skipped(0, 107.0) == []
    assert engine.tick(109.0) == []
    engine.ended(0)
    assert engine.tick(1000.0) == []


def test_any_rank_is_the_coordinators_matter() -> None:
    rule = Rule("step", "step", ranks="any", start="go", must_recur_within_s=3.0)
    engine = engine_of(rule)
    assert engine.read(1, ["go"], 1.0) == [RuleMatch(rule, "start")]
    assert engine.read(0, ["step 1", "step 2"], 1.0) == [RuleMatch(rule, "match")], (
        "the node's other rank has begun"
    )
    assert engine.read(0, ["go"], 1.0) == [], "no news"
    assert engine.skipped(0, 1.0) == [RuleMatch(rule, "match")]
    assert engine.tick(1e6) == []


def test_the_coordinator_is_reported_what_holds_at_the_end_of_a_look() -> None:
    rule = Rule("step", "step", ranks="any", start="go", stop="halt", must_recur_within_s=3.0)
    engine = engine_of(rule)
    told = engine.read(0, ["go", "step 1", "step 2", "halt", "go"], 1.0)
    assert told == [RuleMatch(rule, what) for what in ("match", "stop", "start")]


def test_an_alarm_that_fits_all_is_switched_off_without_its_action() -> None:
    engine = engine_of(Rule("chatty", "e", "restart"), FATAL)
    lines = [f"step {number}" for number in range(EVERYTHING_LINES)]
    (off,) = engine.read(0, lines, 1.0)
    assert (
        isinstance(off, DisabledRule)
        and off.why == f"it matches {len(lines)} of the {len(lines)} lines of rank 0 so far, as 'step 0'"
    )
    assert engine.read(1, lines, 1.0) == []
    assert found(engine.read(1, ["FATAL"], 1.0)) == [("fatal", 1)], "others go on"


def test_a_flood_of_an_error_is_not_everything() -> None:
    engine = engine_of(FATAL)
    engine.read(0, ["all is well"] * 10, 1.0)
    assert found(engine.read(0, ["FATAL"] * 50, 2.0)) == [("fatal", 0)]


def test_a_rule_that_takes_too_long_is_switched_off() -> None:
    rule = LOSS._replace(must_recur_within_s=3.0)
    engine = engine_of(rule)
    engine.read(0, ["loss 1"], 1.0)
    (off,) = engine.read(0, ["loss 1"], 2.0, lambda _work: None)
    assert off == DisabledRule(rule, "it takes too long on the output of rank 0")
    assert not engine.wants_lines
    assert engine.tick(1000.0) == [], "nor is anything awaited by it"


def test_of_a_long_line_the_beginning_counts() -> None:
    engine = engine_of(FATAL)
    assert engine.read(0, ["x" * MAX_LINE_CHARACTERS + "FATAL"], 1.0) == []
    (told,) = engine.read(0, ["FATAL" + "x" * MAX_LINE_CHARACTERS], 1.0)
    assert isinstance(told, RuleFinding) and len(told.why) < 250


RULES = (
    FATAL,
    LOSS._replace(must_be_below=5.0, must_not_jump=3.0, ranks="first"),
    Rule("step", r"^step", must_start_within_s=3.0, must_recur_within_s=2.0, stop="halt", start="go"),
    Rule("some", "step", ranks="any", must_recur_within_s=2.0),
)
LINE = st.sampled_from(
    ["go", "halt", "step 1 loss=2", "step 2 loss=nan", "loss=9", "FATAL", "loss=x", "", "all well"]
)


@given(st.lists(st.tuples(st.integers(0, 2), st.lists(LINE, max_size=30), st.floats(0.0, 4.0)), max_size=30))
def test_any_output_is_reported_of_within_bounds(looks: list[tuple[int, list[str], float]]) -> None:
    engine, whole = engine_of(*RULES, ranks=3), engine_of(FATAL, ranks=3)
    now_s, told, fatal = 0.0, list[Outcome](), set[int]()
    for rank, lines, wait_s in looks:
        now_s += wait_s
        told += engine.read(rank, lines, now_s)
        told += engine.tick(now_s)
        if "FATAL" in lines:
            fatal.add(rank)
        assert len(whole.read(rank, lines, now_s)) <= 1
    if not any(isinstance(each, DisabledRule) for each in told):
        assert {rank for name, rank in found(told) if name == "fatal"} == fatal
    assert len(found(told)) == len([each for each in told if isinstance(each, RuleFinding)])
    for name in ("fatal", "loss"):
        ranks = [rank for of, rank in found(told) if of == name and rank != ANY_RANK]
        assert len(ranks) == len(set(ranks)), "once for each rank"
    assert all(each.rank == 0 for each in told if isinstance(each, MetricValue))
    assert all(each.rule.name == "some" for each in told if isinstance(each, RuleMatch))


@given(st.lists(LINE, max_size=EVERYTHING_LINES - 1), st.integers(1, 10))
def test_it_is_the_same_however_lines_come(lines: list[str], size: int) -> None:
    rules = (LOSS._replace(must_be_below=5.0), FATAL._replace(start="go", stop="halt"))
    at_once, bit_by_bit = engine_of(*rules), engine_of(*rules)
    one = found(at_once.read(0, lines, 1.0))
    other = [
        each
        for begin in range(0, len(lines), size)
        for each in found(bit_by_bit.read(0, lines[begin : begin + size], 1.0))
    ]
    assert sorted(one) == sorted(other)
