"""Lines that must come, and come again: what is late and what is not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.rules.clocks import LineDeadlines
from launcher.rules.rule import Rule

BOTH = Rule("a", "x", must_start_within_s=10.0, must_recur_within_s=3.0)
RECURS = Rule("a", "x", must_recur_within_s=3.0)
STARTS = Rule("a", "x", must_start_within_s=10.0)


def clocks_of(rule: Rule, now_s: float = 0.0) -> LineDeadlines:
    clocks = LineDeadlines()
    clocks.begin(rule, 0, now_s)
    return clocks


def test_a_line_that_never_comes_is_late_once() -> None:
    clocks = clocks_of(BOTH)
    assert clocks.deadline_s() == 10.0
    assert clocks.take_late(9.9) == []
    (late,) = clocks.take_late(10.0)
    assert (late.rank, late.why) == (0, "no matching line within 10 s of the ranks' start")
    assert clocks.take_late(1000.0) == []
    assert clocks.deadline_s() is None


def test_a_line_that_comes_has_to_come_again_if_that_is_asked_for() -> None:
    clocks = clocks_of(BOTH)
    clocks.matched(BOTH, 0, 9.0)
    assert clocks.take_late(11.9) == []
    assert clocks.take_late(12.0)[0].why == "no further matching line within 3 s of the last"
    clocks.matched(BOTH, 0, 50.0)
    assert clocks.deadline_s() == 53.0
    once = clocks_of(STARTS)
    once.matched(STARTS, 0, 1.0)
    assert once.deadline_s() is None


def test_without_a_first_line_none_has_to_come_again() -> None:
    assert clocks_of(RECURS).deadline_s() is None


def test_a_start_begins_it_and_a_stop_ends_it() -> None:
    rule = BOTH._replace(start="go", stop="halt")
    clocks = clocks_of(rule)
    assert clocks.deadline_s() is None
    clocks.matched(rule, 0, 1.0)
    assert clocks.deadline_s() is None
    clocks.started(rule, 0, 5.0)
    assert clocks.deadline_s() == 15.0
    clocks.started(rule, 0, 9.0)
    assert clocks.deadline_s() == 15.0, "it runs"
    clocks.stopped(rule, 0)
    assert clocks.deadline_s() is None
    clocks.started(rule, 0, 100.0)
    assert clocks.take_late(110.0)[0].why == "no matching line within 10 s of the rule's start"


def test_what_was_not_read_and_who_has_ended_is_not_late() -> None:
    clocks = clocks_of(BOTH)
    clocks.begin(BOTH, 1, 0.0)
    clocks.renew(0, 8.0)
    assert [late.rank for late in clocks.take_late(12.0)] == [1]
    clocks.ended(0)
    assert clocks.take_late(100.0) == []
    clocks = clocks_of(BOTH)
    clocks.drop(BOTH)
    assert clocks.deadline_s() is None


@given(
    st.lists(st.floats(0.1, 20.0), min_size=1, max_size=30),
    st.floats(1.0, 10.0),
    st.floats(1.0, 10.0),
)
def test_late_is_exactly_what_a_gap_says(gaps_s: list[float], start_s: float, recur_s: float) -> None:
    rule = Rule("a", "x", must_start_within_s=start_s, must_recur_within_s=recur_s)
    clocks = clocks_of(rule)
    now_s = 0.0
    for gap_s in gaps_s:
        due_s = clocks.deadline_s()
        assert due_s is not None
        now_s += gap_s
        late = clocks.take_late(now_s)
        assert bool(late) == (now_s >= due_s)
        if late:
            assert clocks.take_late(now_s + 1e6) == [], "told once"
        clocks.matched(rule, 0, now_s)
