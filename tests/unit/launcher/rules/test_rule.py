"""Rules as they stand in bootseer.toml: what is read of them, and what a broken one is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import ConfigError
from bootseer.job_file import RULES, parse
from launcher.rules.rule import KEYS, MAX_RULES, Rule, read_rules

LOSS = r"loss[=: ]+(?P<loss>\S+)"


def read(text: str) -> tuple[Rule, ...]:
    return read_rules(parse(text.encode(), "job.toml")[RULES], "job.toml")


def test_a_whole_rule() -> None:
    rules = read(
        """
[[rule]]
name = "loss"
pattern = 'loss[=: ]+(?P<loss>\\S+)'
metric = "loss"
must_be_below = 100
must_be_finite = true
must_not_jump = 5
times = 2
must_start_within_s = 600
must_recur_within_s = 60.5
ranks = [0, 7]
start = "^training"
stop = "^evaluation"
action = "restart"

[[rule]]
name = "fatal"
pattern = "FATAL"
"""
    )
    assert rules[0] == Rule(
        "loss", LOSS, "restart", (0, 7), "loss", 100.0, None, True, 5.0, 2, 600.0, 60.5, "^training", "^evaluation"
    )
    assert rules[1] == Rule("fatal", "FATAL")
    assert rules[1].is_alarm and not rules[0].is_alarm and rules[0].has_clock


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"pattern": "x"}, "[[rule]] 1: name is missing"),
    ({"name": "a"}, "(a): pattern is missing"),
    ({"name": "a", "pattern": "("}, "(a) pattern: is no regular expression"),
    ({"name": "a", "pattern": "x" * 2001}, "(a) pattern: longer than 2000"),
    ({"name": "a", "pattern": "x", "stop": "["}, "(a) stop: is no regular expression"),
    ({"name": "a", "pattern": 7}, "(a) pattern: has to be a text"),
    ({"name": "a", "pattern": ".*"}, "(a) pattern: fits every line"),
    ({"name": "a", "pattern": "."}, "(a) pattern: fits every line"),
    ({"name": "a", "pattern": "x*"}, "(a) pattern: fits every line"),
    ({"name": "a", "pattern": "x", "patern": "y"}, "unknown key 'patern'"),
    ({"name": "a", "pattern": "x", "action": "reboot"}, "(a) action: 'reboot': the values are report, restart"),
    ({"name": "a", "pattern": "x", "metric": "loss"}, "(a) metric: the pattern has no group"),
    ({"name": "a", "pattern": "x", "must_be_below": 3}, "(a) must_be_below: needs a metric"),
    ({"name": "a", "pattern": "x", "must_be_finite": False}, "(a) must_be_finite: needs a metric"),
    ({"name": "a", "pattern": LOSS, "metric": "loss", "must_be_below": "3"}, "must_be_below: has to be a number"),
    ({"name": "a", "pattern": LOSS, "metric": "loss", "must_be_below": float("nan")}, "has to be a number"),
    ({"name": "a", "pattern": LOSS, "metric": "loss", "must_be_finite": 1}, "has to be true or false"),
    (
        {"name": "a", "pattern": LOSS, "metric": "loss", "must_not_jump": 1},
        "must_not_jump: 1: has to be more than 1",
    ),
    ({"name": "a", "pattern": LOSS, "metric": "loss", "times": 0}, "times: has to be a whole number"),
    ({"name": "a", "pattern": LOSS, "metric": "loss", "times": True}, "times: has to be a whole number"),
    (
        {"name": "a", "pattern": LOSS, "metric": "loss", "must_be_below": 1, "must_be_above": 2},
        "must_be_below: no number is below 1 and above 2",
    ),
    ({"name": "a", "pattern": "x", "must_recur_within_s": 0.1}, "must_recur_within_s: 0.1: give seconds"),
    (
        {"name": "a", "pattern": "x", "must_start_within_s": float("inf")},
        "must_start_within_s: has to be a number",
    ),
    ({"name": "a", "pattern": "x", "ranks": "some"}, "ranks: give all, any, first, last, or a list"),
    ({"name": "a", "pattern": "x", "ranks": []}, "ranks: give"),
    ({"name": "a", "pattern": "x", "ranks": [-1]}, "ranks: give"),
    ({"name": "a", "pattern": "x", "ranks": [True]}, "ranks: give"),
    ({"name": "a\nb", "pattern": "x"}, "name: at most 64 characters"),
    ({"name": "a" * 65, "pattern": "x"}, "name: at most 64 characters"),
]


@pytest.mark.parametrize(("table", "told"), BROKEN)
def test_a_broken_rule_is_reported_in_one_line(table: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_rules([table], "job.toml")
    assert str(error.value).startswith("job.toml: [[rule]] 1") and told in str(error.value)
    assert "\n" not in str(error.value).replace("a\nb", "")


def test_names_are_used_once_and_rules_are_few() -> None:
    with pytest.raises(ConfigError, match=r"\[\[rule\]\] 2 \(a\) name: another rule has this name"):
        read_rules([{"name": "a", "pattern": "x"}, {"name": "a", "pattern": "y"}], "f")
    with pytest.raises(ConfigError, match="there may be 64"):
        read_rules([{"name": str(number), "pattern": "x"} for number in range(MAX_RULES + 1)], "f")


@pytest.mark.parametrize("text", ["[rule]\nname = 'a'\n", "rule = 3\n", "rule = [1]\n"])
def test_a_rule_is_a_table_of_a_list(text: str) -> None:
    with pytest.raises(ConfigError, match=r"each rule is a table: write \[\[rule\]\]"):
        parse(text.encode(), "job.toml")


def test_a_line_that_must_come_may_be_any_line() -> None:
    assert read_rules([{"name": "a", "pattern": ".", "must_recur_within_s": 60}], "f")[0].has_clock


@pytest.mark.parametrize(
    ("ranks", "about"),
    [("all", {0, 1, 2, 3}), ("any", {0, 1, 2, 3}), ("first", {0}), ("last", {3}), ((1, 2, 9), {1, 2})],
)
def test_ranks(ranks: str | tuple[int, ...], about: set[int]) -> None:
    rule = Rule("a", "x", ranks=ranks)
    assert {rank for rank in range(4) if rule.is_about(rank, 4)} == about


ANYTHING = st.one_of(
    st.text("ab(.*)[?+{1}$", max_size=20),
    st.integers(),
    st.floats(),
    st.booleans(),
    st.lists(st.integers(-2, 9), max_size=3),
    st.none(),
)


@given(st.dictionaries(st.sampled_from([*KEYS, "else"]), ANYTHING))
def test_anything_is_a_rule_or_a_line(table: dict[str, Any]) -> None:
    try:
        (rule,) = read_rules([table], "f")
    except ConfigError as error:
        assert str(error).startswith("f: [[rule]] 1")
    else:
        assert rule.name and rule.pattern
