"""Sums of parts make up the sum of the whole, in any order; overlaps never do."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.format.part_sums import PartSums, combine
from bootseer.crc import crc32c


@given(st.binary(max_size=3000), st.binary(max_size=3000))
def test_combine(one: bytes, other: bytes) -> None:
    assert combine(crc32c(one), crc32c(other), len(other)) == crc32c(one + other)


def test_combine_large() -> None:
    one, other = bytes(range(256)) * 5000, b"\0" * (16 << 20)
    assert combine(crc32c(one), crc32c(other), len(other)) == crc32c(one + other)


@given(st.binary(min_size=1, max_size=500), st.sets(st.integers(1, 499), max_size=20), st.randoms())
def test_any_order(data: bytes, cuts: set[int], order: random.Random) -> None:
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    parts = list(itertools.pairwise(edges))
    order.shuffle(parts)
    sums = PartSums()
    answers = [sums.add("f", 3, a, b - a, crc32c(data[a:b]), len(data)) for a, b in parts]
    assert answers[-1] == crc32c(data)
    assert answers[:-1] == [None] * (len(parts) - 1)
    assert not sums._parts


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 100)), max_size=30))
def test_overlaps_are_left_out(spans: list[tuple[int, int]]) -> None:
    data = bytes(range(100))
    sums = PartSums()
    for start, length in spans:
        end = min(100, start + length)
        answer = sums.add("f", 0, start, end - start, crc32c(data[start:end]), 100)
        assert answer in (None, crc32c(data))


def test_forgets() -> None:
    sums = PartSums()
    assert sums.add("f", 0, 0, 1, 5, 2) is None
    sums.forget("f", 0)
    assert sums.add("f", 0, 1, 1, 5, 2) is None
    for number in range(1000):
        sums.add("g", 0, 2 * number, 1, 5, 10_000)
    assert len(sums._parts["g", 0]) <= 64
