"""Sets of byte ranges against sets of bytes."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bootseer.storage.engine.extents import Extents, cut

BOUND = 60
ranges = st.tuples(st.integers(0, BOUND), st.integers(0, BOUND))
steps = st.lists(st.tuples(st.booleans(), ranges), max_size=30)


def build(found: list[tuple[bool, tuple[int, int]]]) -> tuple[Extents, set[int]]:
    spans, model = Extents(), set[int]()
    for adds, (start, end) in found:
        if adds:
            spans.add(start, end)
            model |= set(range(start, end))
        else:
            spans.remove(start, end)
            model -= set(range(start, end))
    return spans, model


def bytes_of(pieces: list[tuple[int, int]]) -> list[int]:
    return [at for start, end in pieces for at in range(start, end)]


@given(steps, ranges)
def test_it_is_a_set_of_bytes(found: list[tuple[bool, tuple[int, int]]], asked: tuple[int, int]) -> None:
    spans, model = build(found)
    pieces = list(spans)
    assert bytes_of(pieces) == sorted(model)
    assert all(start < end for start, end in pieces)
    assert all(one[1] < two[0] for one, two in pairwise(pieces))  # sorted, joined
    assert spans.total_bytes == len(model) and len(spans) == len(pieces)
    start, end = asked
    wanted = set(range(start, end))
    if start < end:
        assert bytes_of(spans.within(start, end)) == sorted(wanted & model)
        assert bytes_of(spans.missing(start, end)) == sorted(wanted - model)


@given(steps, steps)
def test_difference(one: list[tuple[bool, tuple[int, int]]], two: list[tuple[bool, tuple[int, int]]]) -> None:
    (a, in_a), (b, in_b) = build(one), build(two)
    assert bytes_of(list(a.minus(b))) == sorted(in_a - in_b)
    assert (a == b) == (in_a == in_b)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 30))
def test_pieces_end_at_multiples(start: int, end: int, every: int) -> None:
    pieces = list(cut(start, end, every))
    assert bytes_of(pieces) == list(range(start, end))
    assert all(each[1] % every == 0 for each in pieces[:-1])
    assert all(each[1] - each[0] <= every for each in pieces)
