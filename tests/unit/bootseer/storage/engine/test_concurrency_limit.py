"""The width: finds what a store gives, stays calm, gives way to errors, comes back. Stores are simulated."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.storage.engine.concurrency_limit import (
    MAX_BACKOFF_S,
    MAX_RETRY_AFTER_S,
    MAX_WIDTH,
    START_WIDTH,
    ConcurrencyLimit,
    backoff_s,
)

PIECE_BYTES = 8 * 1024**2

Rate = Callable[[int], float]  # bytes/s of one stream, of so many in flight


def shared_link(stream: float, link: float) -> Rate:
    """Each stream brings at most `stream` bytes/s, all together at most `link`."""
    return lambda streams: min(stream, link / streams)


class Run:
    """Pieces read at the pace's width from a store that shares its rate fairly among them."""

    def __init__(
        self,
        rate: Rate,
        pieces: int,
        jitter: float = 0.0,
        seed: int = 0,
        pace: ConcurrencyLimit | None = None,
        begin_s: float = 0.0,
    ) -> None:
        self.pace = ConcurrencyLimit() if pace is None else pace
        self.widths = [self.pace.width]
        chance = random.Random(seed)
        left: list[list[float]] = []  # work left in bytes, start
        begun = done = 0
        now_s = begin_s
        while done < pieces:
            while begun < pieces and len(left) < self.pace.width:
                left.append([PIECE_BYTES * (1.0 + jitter * chance.uniform(-1.0, 1.0)), now_s])
                begun += 1
            first = min(left)
            each_rate = rate(len(left))
            step_s = first[0] / each_rate
            for each in left:
                each[0] -= step_s * each_rate
            now_s += step_s
            left.remove(first)
            done += 1
            self.pace.done(first[1], now_s, PIECE_BYTES, is_full=begun < pieces)
            if self.pace.width != self.widths[-1]:
                self.widths.append(self.pace.width)
        self.end_s, self.took_s = now_s, now_s - begin_s

    @property
    def turns(self) -> int:
        """How often the width changed its direction."""
        signs = [after > before for before, after in zip(self.widths, self.widths[1:], strict=False)]
        return sum(after != before for before, after in itertools.pairwise(signs))


def test_grows_to_the_most_where_each_stream_brings_more() -> None:
    run = Run(shared_link(50e6, 1e12), 1000)
    assert run.widths == [8, 16, 32, 64]


def test_stays_where_more_streams_bring_nothing() -> None:
    run = Run(shared_link(1e12, 1e9), 5000)
    assert run.widths[:3] == [8, 16, 8], "one doubling was tried"
    assert max(run.widths) == 16
    assert run.turns <= 30, "of 600 windows: tries get rarer"


def test_tries_get_rarer() -> None:
    few, many = (Run(shared_link(1e12, 1e9), pieces).turns for pieces in (2_000, 20_000))
    assert many <= 6 * few


@settings(max_examples=40, deadline=None)
@given(
    stream=st.floats(10e6, 500e6),
    link=st.floats(100e6, 20e9),
    jitter=st.floats(0.0, 0.3),
    seed=st.integers(0, 1000),
)
def test_brings_most_of_what_a_store_can_give(stream: float, link: float, jitter: float, seed: int) -> None:
    rate = shared_link(stream, link)
    run = Run(rate, 2000, jitter, seed)
    best = min(link, MAX_WIDTH * stream)
    got = 2000 * PIECE_BYTES / run.took_s
    assert got >= 0.69 * best
    for before, after in zip(run.widths, run.widths[1:], strict=False):
        assert 0.5 * before <= after <= 2 * before
    assert all(1 <= width <= MAX_WIDTH for width in run.widths)


@settings(max_examples=20, deadline=None)
@given(jitter=st.floats(0.0, 0.3), seed=st.integers(0, 1000))
def test_width_does_not_swing(jitter: float, seed: int) -> None:
    run = Run(shared_link(100e6, 1.6e9), 4000, jitter, seed)  # 16 streams fill the link
    assert run.turns <= 40, "of about 200 windows"
    assert run.pace.width <= 40


def test_slow_down_narrows_and_recovery_widens() -> None:
    fast, slow = shared_link(100e6, 2e9), shared_link(100e6, 0.2e9)
    run = Run(fast, 2000)
    width = run.pace.width
    assert width >= 16
    run = Run(slow, 1000, pace=run.pace, begin_s=run.end_s)
    assert run.pace.width < width
    run = Run(fast, 4000, pace=run.pace, begin_s=run.end_s)
    assert run.pace.width >= 12


def test_failures_narrow_once_for_all_that_was_under_way() -> None:
    pace = ConcurrencyLimit(start=32)
    for number in range(32):
        pace.failed(started_s=0.0, now_s=1.0 + number / 1000)
    assert pace.width == 22
    for number in range(32):
        pace.failed(started_s=2.0, now_s=3.0 + number / 1000)
    assert pace.width == 15


def test_one_failure_is_forgiven() -> None:
    pace = ConcurrencyLimit()
    pace.failed(0.0, 1.0)
    assert pace.width == START_WIDTH
    pace.failed(1.0, 1.1)
    assert pace.width == 5


def test_errors_alone_bring_it_down_to_one() -> None:
    pace = ConcurrencyLimit()
    for number in range(1000):
        pace.failed(float(number), number + 0.5)
    assert pace.width == 1
    run = Run(shared_link(50e6, 1e12), 3000, pace=pace, begin_s=1000.0)
    assert run.widths[-1] >= 16, "it comes back when the store does"


def test_says_nothing_while_there_is_too_little_to_do() -> None:
    pace = ConcurrencyLimit()
    for number in range(1000):
        pace.done(float(number), number + 1.0, PIECE_BYTES, is_full=False)
    assert pace.width == START_WIDTH


EVENTS = st.lists(
    st.tuples(
        st.booleans(), st.floats(0.0, 5.0), st.floats(0.0, 10.0), st.integers(0, PIECE_BYTES), st.booleans()
    ),
    max_size=300,
)


@given(events=EVENTS)
def test_width_stays_in_its_bounds_whatever_happens(
    events: list[tuple[bool, float, float, int, bool]],
) -> None:
    pace = ConcurrencyLimit(start=4, most=20, least=2)
    now_s = 0.0
    for is_done, step_s, age_s, length, is_full in events:
        now_s += step_s
        before = pace.width
        if is_done:
            pace.done(max(0.0, now_s - age_s), now_s, length, is_full=is_full)
        else:
            pace.failed(max(0.0, now_s - age_s), now_s)
        assert 2 <= pace.width <= 20
        assert before // 2 <= pace.width <= 2 * before


@pytest.mark.parametrize("widths", [(0, 8, 64), (1, 65, 64), (9, 8, 64)])
def test_impossible_widths_are_refused(widths: tuple[int, int, int]) -> None:
    least, start, most = widths
    with pytest.raises(ValueError, match="widths"):
        ConcurrencyLimit(start=start, most=most, least=least)


@given(failures=st.integers(1, 10_000), jitter=st.floats(0.0, 1.0), retry_after_s=st.floats(-5.0, 1e6))
def test_backoff_is_random_and_bounded(failures: int, jitter: float, retry_after_s: float) -> None:
    wait_s = backoff_s(failures, jitter, retry_after_s)
    asked_s = min(MAX_RETRY_AFTER_S, max(0.0, retry_after_s))
    assert asked_s <= wait_s <= asked_s + min(MAX_BACKOFF_S, 0.1 * 2.0 ** min(failures - 1, 10))
    assert backoff_s(failures, 0.0) == 0.0


def test_backoff_doubles() -> None:
    assert [backoff_s(failures, 1.0) for failures in (1, 2, 3, 8, 20)] == [0.1, 0.2, 0.4, 8.0, 8.0]
