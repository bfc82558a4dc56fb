"""Which units ranks wait for, which are retried, and when the store is given up."""

from __future__ import annotations

from bootseer.checkpoint.service.awaited_units import AWAY_WAIT_S, AwaitedUnits

LIMIT_S = 60.0


def planned(*units: tuple[int, int]) -> AwaitedUnits:
    awaited = AwaitedUnits()
    awaited.plan(units, 0.0)
    awaited.is_waiting = True
    return awaited


def test_ranks_wait_for_planned_units() -> None:
    awaited = planned((0, 0), (0, 1))
    assert awaited.holds_ranks and awaited.holds_for([(0, 1), (3, 3)]) and not awaited.holds_for([(3, 3)])
    awaited.settle([(0, 0), (0, 1)], 1.0)
    assert not awaited.holds_ranks
    awaited.is_waiting = False
    awaited.plan([(0, 0)], 2.0)
    assert not awaited.holds_ranks and not awaited.holds_for([(0, 0)])


def test_units_are_retried_once_until_they_fail_again() -> None:
    awaited = planned((0, 0), (0, 1))
    assert awaited.take_retries(10.0) == []
    assert awaited.add_away([(0, 0)], "HTTP 503", 0.0)
    assert not awaited.add_away([(0, 1)], "HTTP 503", 1.0)
    assert awaited.take_retries(AWAY_WAIT_S) == []  # the second one has just failed
    assert awaited.take_retries(1.0 + AWAY_WAIT_S) == [(0, 0), (0, 1)]
    assert awaited.take_retries(100.0) == []
    awaited.settle([(0, 0)], 100.0)
    awaited.add_away([(0, 1)], "HTTP 503", 100.0)
    assert awaited.take_retries(100.0 + AWAY_WAIT_S) == [(0, 1)]


def test_a_store_that_sends_nothing_is_given_up() -> None:
    awaited = planned((0, 0))
    awaited.move(5.0)
    assert awaited.why_given_up(5.0 + LIMIT_S, LIMIT_S) == ""
    assert awaited.why_given_up(5.1 + LIMIT_S, LIMIT_S) == "no bytes received for 60 s"
    awaited.add_away([(0, 0)], "HTTP 503", 6.0)
    assert awaited.why_given_up(5.1 + LIMIT_S, LIMIT_S) == "no bytes received for 60 s: HTTP 503"
    awaited.begin()
    assert awaited.why_given_up(5.1 + LIMIT_S, LIMIT_S) == "no bytes received for 60 s"
    assert not awaited.planned and not awaited.is_waiting
