"""Turns: what is granted keeps to its rate, whoever asks when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.storage.engine.rate_limit import MIN_PIECE_BYTES, RateLimiter

BURST_S = 0.05

grants = st.lists(st.tuples(st.integers(1, 1 << 20), st.floats(0, 1)), min_size=1, max_size=50)


@given(st.floats(1e3, 1e10), grants)
def test_turns_keep_to_their_rate(rate: float, taken: list[tuple[int, float]]) -> None:
    turns = RateLimiter(rate, BURST_S)
    now_s = last_s = 100.0
    sent = 0
    for count, pause_s in taken:
        now_s += pause_s
        wait_s = turns.wait_s(count, now_s)
        assert wait_s >= 0
        begin_s = now_s + wait_s
        assert begin_s >= last_s - 1e-6, "first come, first served"
        # What was granted before this one has gone through by then, but for the burst.
        assert sent <= rate * (begin_s - 100.0 + BURST_S) * (1 + 1e-6) + 1
        sent += count
        last_s = begin_s


def test_without_a_limit() -> None:
    turns = RateLimiter(None)
    assert [turns.wait_s(1 << 40, 0.0) for _ in range(3)] == [0.0] * 3
    with pytest.raises(ValueError, match="bytes/s"):
        RateLimiter(0)


@given(st.integers(0, 1 << 30), st.floats(1, 1e11))
def test_pieces_are_small_and_aligned(most: int, rate: float) -> None:
    piece = RateLimiter(rate).piece_bytes(most)
    assert piece == most or piece % MIN_PIECE_BYTES == 0
    assert piece <= max(MIN_PIECE_BYTES, rate * 0.02)
    assert RateLimiter(None).piece_bytes(most) == most
