"""Ranges that are there, against a set of all their bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bootseer.storage.engine.extents import Extents

SIZE = 64
ranges = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE)).map(sorted).map(tuple)
steps = st.lists(st.tuples(st.booleans(), ranges), max_size=30)


@given(steps, ranges)
def test_it_is_a_set_of_bytes(taken: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]) -> None:
    extents, model = Extents(), set[int]()
    for is_added, (start, end) in taken:
        if is_added:
            extents.add(start, end)
            model |= set(range(start, end))
        else:
            extents.remove(start, end)
            model -= set(range(start, end))
        found = list(extents)
        assert {byte for first, last in found for byte in range(first, last)} == model
        assert all(first < last for first, last in found)
        assert all(one[1] < other[0] for one, other in pairwise(found)), "none touches another"
        assert extents.total_bytes == len(model)
        assert len(extents) == len(found)
    gaps = extents.missing(*asked)
    assert {byte for first, last in gaps for byte in range(first, last)} == set(range(*asked)) - model
    assert all(first < last for first, last in gaps)
    at = asked[0]
    while at in model:
        at += 1
    assert extents.reach(asked[0]) == at
