"""Stripe arithmetic: any size, unit, number of stripes and range equals the plain file."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.checkpoint.format.layout import Layout

layouts = st.builds(Layout, st.integers(0, 700), st.integers(1, 64), st.integers(1, 9))


def content(size: int) -> bytes:
    return bytes(number * 7 % 251 for number in range(size))


def stripe_files(layout: Layout, data: bytes) -> list[bytes]:
    units = [data[at : at + layout.unit_bytes] for at in range(0, layout.size, layout.unit_bytes)]
    return [b"".join(units[stripe :: layout.stripes]) for stripe in range(layout.stripes)]


@given(layouts, st.data())
def test_pieces_of_stripes_are_the_plain_file(layout: Layout, data: st.DataObject) -> None:
    plain = content(layout.size)
    stripes = stripe_files(layout, plain)
    assert [len(stripe) for stripe in stripes] == [layout.stripe_size(number) for number in range(layout.stripes)]
    offset = data.draw(st.integers(0, layout.size))
    length = data.draw(st.integers(0, layout.size - offset))
    pieces = list(layout.pieces(offset, length))
    read = b"".join(
        stripes[piece.stripe][piece.stripe_offset : piece.stripe_offset + piece.length] for piece in pieces
    )
    assert read == plain[offset : offset + length]
    assert sum(piece.length for piece in pieces) == length
    at = offset
    for piece in pieces:
        assert piece.offset == at and piece.length > 0
        at += piece.length


@given(layouts)
def test_units_are_the_file(layout: Layout) -> None:
    lengths = [layout.unit_length(unit) for unit in range(layout.units)]
    assert sum(lengths) == layout.size
    assert all(length == layout.unit_bytes for length in lengths[:-1])
    assert all(0 < length <= layout.unit_bytes for length in lengths)


@pytest.mark.parametrize(("offset", "length"), [(-1, 1), (0, 101), (100, 1), (0, -1)])
def test_ranges_outside_are_refused(offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="of a file of 100"):
        list(Layout(100, 10, 3).pieces(offset, length))
