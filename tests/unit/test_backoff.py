"""Waits between retries."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.backoff import Backoff

TIMES = st.floats(0.001, 1000.0)


@given(first_s=TIMES, max_s=TIMES, failures=st.integers(1, 10_000), jitter=st.floats(0.0, 1.0))
def test_waits_are_bounded_and_grow(first_s: float, max_s: float, failures: int, jitter: float) -> None:
    backoff = Backoff(first_s, max_s)
    wait_s = backoff.wait_s(failures, jitter)
    assert 0.0 <= wait_s <= backoff.wait_s(failures) <= max_s
    assert backoff.wait_s(failures) <= backoff.wait_s(failures + 1)
    assert backoff.wait_s(1) == min(first_s, max_s)


def test_waits_double() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.wait_s(failures) for failures in (1, 2, 3, 4, 99)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.wait_s(2, 0.25) == 0.25
