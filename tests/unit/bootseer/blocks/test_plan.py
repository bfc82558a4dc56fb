"""Spans and plans: every block once, within bounds, in an order that a start can follow."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks import plan
from bootseer.blocks.plan import MAX_NEAR, NearDemand, plan_cold, plan_hot
from bootseer.blocks.spans import MAX_GAP_BYTES, Span, plan_spans, runs_of
from tests.unit.bootseer.blocks.trees import make_tree

TREE = make_tree(60, pack_bytes=900_000)
INDEX = TREE.index
NUMBERS = st.lists(st.integers(0, TREE.count - 1), max_size=80)


def check(spans: list[Span], numbers: list[int], span_bytes: int, max_gap_bytes: int) -> None:
    assert sorted(number for span in spans for number in span.numbers) == sorted(set(numbers))
    for span in spans:
        reached = span.offset
        for block in span.blocks:
            assert block == (block.number, *(getattr(INDEX.block(block.number), name) for name in FIELDS))
            assert INDEX.block(block.number).pack == span.pack
            assert 0 <= block.offset - reached <= max_gap_bytes
            reached = block.end
        assert span.length == reached - span.offset
        assert span.length <= span_bytes or len(span.blocks) == 1
        assert span.offset + span.length <= INDEX.packs[span.pack][1]


FIELDS = ("digest", "offset", "stored_bytes", "raw_bytes")


@given(NUMBERS, st.integers(1, 1 << 20), st.integers(0, 1 << 18))
def test_each_block_is_in_one_span_within_bounds(numbers: list[int], span_bytes: int, gap: int) -> None:
    spans = plan_spans(INDEX, numbers, span_bytes=span_bytes, max_gap_bytes=gap)
    check(spans, numbers, span_bytes, gap)
    firsts = [min(numbers.index(number) for number in span.numbers) for span in spans]
    assert firsts == sorted(firsts)


@given(NUMBERS, st.integers(1, 10), st.integers(0, 30))
def test_hot_blocks_stay_within_their_window(numbers: list[int], first: int, more: int) -> None:
    spans = plan_hot(INDEX, numbers, first_window=first, max_window=first + more)
    check(spans, numbers, 1 << 20, MAX_GAP_BYTES)
    order = list(dict.fromkeys(numbers))
    fetched = [number for span in spans for number in span.numbers]
    begin, window = 0, first
    while begin < len(order):
        assert set(fetched[begin : begin + window]) == set(order[begin : begin + window])
        begin, window = begin + window, min(first + more, window * 2)


@given(NUMBERS)
def test_cold_blocks_come_in_the_order_of_the_packs(numbers: list[int]) -> None:
    spans = list(plan_cold(INDEX, numbers))
    check(spans, numbers, 4 << 20, MAX_GAP_BYTES)
    places = [(span.pack, span.offset) for span in spans]
    assert places == sorted(places)


@given(NUMBERS, st.dictionaries(st.integers(0, 20), st.integers(0, TREE.count - 1)))
def test_blocks_near_a_demand_come_next(numbers: list[int], wanted: dict[int, int]) -> None:
    """`wanted`: a reader waits for a block after so many spans; it fetches that one itself."""
    near = NearDemand(INDEX, numbers)
    spans: list[Span] = []
    demanded: set[int] = set()
    for span in near:
        spans.append(span)
        if (number := wanted.get(len(spans))) is not None:
            near.want(number)
            demanded.add(number)
    fetched = [number for span in spans for number in span.numbers]
    assert len(fetched) == len(set(fetched))
    assert set(numbers) - demanded <= set(fetched) <= set(numbers)


def test_the_last_demand_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "NEAR_BLOCKS", 8)
    near = NearDemand(INDEX, range(TREE.count))
    spans = iter(near)
    assert next(spans).numbers[0] == 0
    near.want(11)
    near.want(17)
    rest = [number for span in spans for number in span.numbers]
    later = [number for number in rest if number >= 8]
    assert later == [*range(18, 26), *range(12, 17), 8, 9, 10, *range(26, TREE.count)]


def test_few_demands_are_remembered() -> None:
    near = NearDemand(INDEX, range(TREE.count))
    for _ in range(MAX_NEAR * 3):
        near.want(TREE.count - 2)
    assert [number for span in near for number in span.numbers] == [TREE.count - 1, *range(TREE.count - 2)]


def test_neighbours_make_one_request() -> None:
    assert len(list(plan_cold(INDEX, range(TREE.count)))) == len(INDEX.packs)
    assert len(plan_hot(INDEX, range(TREE.count))) < TREE.count / 3
    scattered = range(0, TREE.count, 4)
    assert len(plan_spans(INDEX, scattered, max_gap_bytes=MAX_GAP_BYTES // 2)) == len(scattered)


@given(st.lists(st.integers(0, 20)))
def test_runs_are_the_numbers_again(numbers: list[int]) -> None:
    runs = list(runs_of(numbers))
    assert [first + at for first, count in runs for at in range(count)] == numbers
    assert all(first + count != later for (first, count), (later, _) in itertools.pairwise(runs))


def test_blocks_that_overlap_are_still_within_bounds() -> None:
    """An index may say so; it is signed, not wise."""
    from bootseer.tree.index import BLOCK, Index

    digest = bytes(32)
    blocks = b"".join(BLOCK.pack(digest, 0, at, 100_000, 131072) for at in (0, 0, 50_000, 1000, 90_000))
    index = Index(**{**{name: getattr(INDEX, name) for name in INDEX.__struct_fields__}, "blocks": blocks})
    spans = plan_spans(index, range(5), span_bytes=150_000)
    assert sorted(number for span in spans for number in span.numbers) == list(range(5))
    assert all(span.length <= 150_000 and min(b.offset for b in span.blocks) == span.offset for span in spans)
