"""Deadlines and hedges follow what reads of the same length took."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.storage.engine import hedge
from bootseer.storage.engine.hedge import ReadDurations, may_hedge

MIB = 1024**2


def test_nothing_known_means_long_patience() -> None:
    patience = ReadDurations()
    assert patience.p95_s(MIB) is None
    assert patience.deadline_s(8 * MIB) == hedge.FIRST_DEADLINE_S
    assert patience.overdue_s(8 * MIB) == hedge.FIRST_OVERDUE_S


@given(seconds=st.lists(st.floats(0.001, 100.0), min_size=8, max_size=400))
def test_deadline_and_age_follow_p95(seconds: list[float]) -> None:
    patience = ReadDurations()
    for each in seconds:
        patience.took(8 * MIB, each)
    p95_s = patience.p95_s(8 * MIB)
    assert p95_s is not None
    assert min(seconds) <= p95_s <= max(seconds)
    assert patience.deadline_s(8 * MIB) == max(5.0, 8.0 * p95_s)
    assert patience.overdue_s(8 * MIB) == max(0.5, 3.0 * p95_s)
    assert patience.deadline_s(8 * MIB, 2) == 4.0 * patience.deadline_s(8 * MIB)


def test_p95_is_that_of_the_last_reads() -> None:
    patience = ReadDurations()
    for _ in range(300):
        patience.took(MIB, 1.0)
    for _ in range(256):
        patience.took(MIB, 2.0)
    assert patience.p95_s(MIB) == 2.0
    for _ in range(32):
        patience.took(MIB, 50.0)
    assert patience.p95_s(MIB) == 50.0, "an eighth of the reads is more than one in twenty"


def test_short_reads_say_nothing_about_long_ones() -> None:
    patience = ReadDurations()
    for _ in range(100):
        patience.took(4096, 0.001)
    assert patience.deadline_s(4096) == patience.deadline_s(100) == hedge.MIN_DEADLINE_S
    assert patience.deadline_s(8 * MIB) == hedge.FIRST_DEADLINE_S


@given(pieces=st.integers(1, 10_000), done=st.integers(0, 10_000), in_flight=st.integers(0, 64))
def test_hedges_are_few(pieces: int, done: int, in_flight: int) -> None:
    sent = 0
    while may_hedge(pieces=pieces, done=done, hedges=sent, in_flight=in_flight):
        sent += 1
    assert sent <= max(1, pieces * 0.05)
    if sent:
        assert done > 0.9 * pieces or in_flight < 4


def test_one_hedge_is_always_allowed() -> None:
    assert may_hedge(pieces=1, done=0, hedges=0, in_flight=0)
    assert not may_hedge(pieces=1, done=0, hedges=1, in_flight=0)
    assert not may_hedge(pieces=100, done=50, hedges=0, in_flight=8)
    assert may_hedge(pieces=100, done=91, hedges=4, in_flight=8)
