"""Which reads of an open file are taken for one reader."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from bootseer.mounts.fuse.streams import DISORDER_BYTES, GROWTH, START_BYTES, SequentialRuns

KIB = 1 << 10
STEP = 128 * KIB


def test_reader_gets_a_window_that_grows() -> None:
    runs = SequentialRuns()
    windows = [runs.note(at, STEP).window_bytes for at in range(0, 4 * START_BYTES, STEP)]
    first = START_BYTES // STEP - 1
    assert windows[:first] == [0] * first
    assert windows[first:] == [GROWTH * STEP * (count + 1) for count in range(first, len(windows))]


def test_window_is_ahead_of_the_reader() -> None:
    runs = SequentialRuns()
    for at in range(10 * STEP, 40 * STEP, STEP):
        ahead = runs.note(at, STEP)
    assert ahead.position == 40 * STEP


def test_reads_here_and_there_are_no_reader() -> None:
    runs, pick = SequentialRuns(), random.Random(5)
    for _ in range(10_000):
        assert not runs.note(pick.randrange(0, 1 << 36), STEP).window_bytes


def test_readers_of_one_descriptor_are_reported_apart() -> None:
    runs = SequentialRuns()
    found = {}
    for step in range(20):
        for reader in range(8):
            ahead = runs.note((reader << 30) + step * STEP, STEP)
            found.setdefault(reader, set()).add(ahead.run)
            assert bool(ahead.window_bytes) == ((step + 1) * STEP >= START_BYTES)
    assert len(set.union(*found.values())) == 8


def test_reading_again_from_the_start_is_a_reader_again() -> None:
    runs = SequentialRuns()
    for _ in range(3):
        windows = [runs.note(at, STEP).window_bytes for at in range(0, 8 * START_BYTES, STEP)]
        assert windows[-1]
        assert not windows[0]


@given(st.randoms(use_true_random=False), st.integers(2, 12))
def test_reads_that_overtake_each_other_are_one_reader(pick: random.Random, disorder: int) -> None:
    """The kernel sends several requests of one reader at once; threads take them in any order."""
    offsets = list(range(0, 8 * START_BYTES, STEP))
    shuffled = []
    for begin in range(0, len(offsets), disorder):
        group = offsets[begin : begin + disorder]
        pick.shuffle(group)
        shuffled += group
    assert disorder * STEP <= DISORDER_BYTES
    runs = SequentialRuns()
    seen = [runs.note(at, STEP) for at in shuffled]
    later = seen[len(seen) // 2 :]
    assert sum(bool(ahead.window_bytes) for ahead in later) >= len(later) // (2 * disorder)
    assert max(ahead.position for ahead in seen) == 8 * START_BYTES
