"""The restart budget: never more than allowed, never a smaller count, waits that grow and are bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from launcher.policy import MOST_BACKOFF_S, RestartPolicy, SameError

LIVES = st.lists(st.floats(0.0, 1e5), max_size=50)


@given(max_restarts=st.integers(0, 10), lives=LIVES)
def test_no_more_restarts_than_allowed(max_restarts: int, lives: list[float]) -> None:
    policy = RestartPolicy(max_restarts, 30.0, 1.0)
    delays = [policy.after_failure(lived_s) for lived_s in lives]
    assert delays == [*delays[:max_restarts], *[None] * (len(delays) - max_restarts)]
    assert None not in delays[:max_restarts]
    assert policy.count == min(max_restarts, len(lives))


@given(max_restarts=st.integers(0, 5), refill_s=st.floats(0.1, 1e4), lives=LIVES)
def test_refill_gives_the_budget_back_and_the_count_never_falls(
    max_restarts: int, refill_s: float, lives: list[float]
) -> None:
    policy = RestartPolicy(max_restarts, 30.0, 0.0, refill_s)
    counts = []
    for lived_s in lives:
        delay_s = policy.after_failure(lived_s)
        counts.append(policy.count)
        assert policy.used <= max_restarts
        if lived_s >= refill_s and max_restarts:
            assert delay_s == 0.0
            assert policy.used == 1
    assert counts == sorted(counts)


@given(lives=LIVES)
def test_early_failures_in_a_row_wait_longer_up_to_a_bound(lives: list[float]) -> None:
    policy = RestartPolicy(1000, 30.0, 1.0)
    last_s = 0.0
    for lived_s in lives:
        delay_s = policy.after_failure(lived_s)
        assert delay_s is not None
        assert 0.0 <= delay_s <= MOST_BACKOFF_S
        if lived_s >= 30.0:
            assert delay_s == 0.0
            last_s = 0.0
        else:
            assert delay_s >= last_s
            last_s = delay_s


def test_waits_double() -> None:
    policy = RestartPolicy(10, 30.0, 1.0)
    assert [policy.after_failure(0.0) for _ in range(9)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    assert RestartPolicy(2, 30.0, 0.0).after_failure(0.0) == 0.0


def test_the_same_error_in_two_attempts_in_a_row() -> None:
    same = SameError()
    assert same.after_failure(["KeyError at a.py:1", "KeyError at b.py:2"]) == ""
    assert same.after_failure(["KeyError at b.py:2"]) == "KeyError at b.py:2"


def test_another_failure_between_them_begins_anew() -> None:
    same = SameError()
    assert [same.after_failure(each) for each in (["a"], [], ["a"], ["b"], ["a"])] == [""] * 5
