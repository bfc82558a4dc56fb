"""Pieces: every byte that is asked for comes once, nothing more than the gaps allow, no piece is too long."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bootseer.storage.engine.coalesce import PlannedRead, WantedRange, plan_pieces

PATHS = st.sampled_from(["a", "b"])
WANTED = st.lists(
    st.builds(
        WantedRange,
        path=PATHS,
        etag=st.sampled_from(["", "1"]),
        offset=st.integers(0, 300),
        length=st.integers(0, 90),
    ),
    max_size=25,
)


def plan(wanted: list[WantedRange], piece: int = 32, gap: int = 4, small: int = 16) -> list[PlannedRead]:
    return plan_pieces(wanted, piece_bytes=piece, max_gap_bytes=gap, small_bytes=small)


@given(wanted=WANTED, piece=st.integers(1, 64), gap=st.integers(0, 40), small=st.integers(0, 40))
def test_every_byte_comes_to_its_request_once(wanted: list[WantedRange], piece: int, gap: int, small: int) -> None:
    came: list[list[int]] = [[] for _ in wanted]
    for each in plan(wanted, piece, gap, small):
        for part in each.parts:
            asked = wanted[part.request]
            assert (asked.path, asked.etag) == (each.path, each.etag)
            assert part.piece_offset >= 0 and part.piece_offset + part.length <= each.length
            assert each.offset + part.piece_offset == asked.offset + part.request_offset
            came[part.request] += range(part.request_offset, part.request_offset + part.length)
    assert [sorted(numbers) for numbers in came] == [list(range(asked.length)) for asked in wanted]


@given(wanted=WANTED, piece=st.integers(1, 64), gap=st.integers(0, 40), small=st.integers(0, 40))
def test_pieces_are_bounded_and_waste_only_short_gaps(
    wanted: list[WantedRange], piece: int, gap: int, small: int
) -> None:
    for each in plan(wanted, piece, gap, small):
        assert 0 < each.length <= piece
        covered = sorted({n for p in each.parts for n in range(p.piece_offset, p.piece_offset + p.length)})
        assert covered[0] == 0
        assert covered[-1] == each.length - 1
        assert all(after - before - 1 <= gap for before, after in itertools.pairwise(covered))
        assert each.gap_bytes == each.length - len(covered)
        if each.is_direct:
            assert each.gap_bytes == 0
        else:
            assert all(wanted[part.request].length <= small for part in each.parts), "large ones are not copied"


@given(wanted=WANTED)
def test_pieces_come_in_the_order_of_the_requests(wanted: list[WantedRange]) -> None:
    firsts = [min(part.request for part in each.parts) for each in plan(wanted)]
    assert firsts == sorted(firsts)


def test_large_ranges_are_cut_where_the_file_has_multiples_of_a_piece() -> None:
    pieces = plan([WantedRange("a", "", 30, 70)])
    assert [(each.offset, each.length) for each in pieces] == [(30, 2), (32, 32), (64, 32), (96, 4)]
    assert all(each.is_direct for each in pieces)


def test_small_neighbours_share_a_read() -> None:
    wanted = [
        WantedRange("a", "", 20, 5),
        WantedRange("a", "", 0, 10),
        WantedRange("a", "", 13, 7),
        WantedRange("a", "2", 25, 5),
    ]
    pieces = plan(wanted)
    assert [(each.offset, each.length, len(each.parts)) for each in pieces] == [(0, 25, 3), (25, 5, 1)]
    assert pieces[0].gap_bytes == 3


def test_ranges_far_apart_are_read_alone() -> None:
    assert len(plan([WantedRange("a", "", 0, 10), WantedRange("a", "", 15, 10)])) == 2


def test_overlapping_small_ranges_are_read_once() -> None:
    (piece,) = plan([WantedRange("a", "", 0, 10), WantedRange("a", "", 5, 10), WantedRange("a", "", 5, 10)])
    assert (piece.offset, piece.length, piece.gap_bytes) == (0, 15, 0)
