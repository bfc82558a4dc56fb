"""Maps of what is cached: believed in their own boot only; copies only whole."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bootseer.blocks.presence import (
    HEADER_BYTES,
    decode_saved,
    encode_saved,
    is_of_boot,
    make_header,
    read_boot_id,
)

TREE = "ab" * 32


def test_a_map_is_trusted_in_its_boot() -> None:
    header = make_header("boot-1", 7)
    assert len(header) == HEADER_BYTES
    assert is_of_boot(header, "boot-1", 7)
    assert not is_of_boot(header, "boot-2", 7)
    assert not is_of_boot(header, "boot-1", 8)
    assert not is_of_boot(header[:-1], "boot-1", 7)
    assert not is_of_boot(b"", "boot-1", 7)
    assert not is_of_boot(make_header("", 7), "", 7)  # a kernel that does not say


def test_this_kernel_says_which_boot_it_is() -> None:
    assert len(read_boot_id()) == 36
    assert read_boot_id() == read_boot_id()


@given(st.binary(max_size=100))
def test_a_copy_comes_back(marks: bytes) -> None:
    data = encode_saved(TREE, marks)
    assert decode_saved(data, TREE, len(marks)) == marks
    assert decode_saved(data, "cd" * 32, len(marks)) is None
    assert decode_saved(data, TREE, len(marks) + 1) is None


@given(st.binary(min_size=1, max_size=40), st.data())
def test_a_damaged_copy_counts_for_nothing(marks: bytes, data: st.DataObject) -> None:
    whole = bytearray(encode_saved(TREE, marks))
    at = data.draw(st.integers(0, len(whole) - 1))
    assert decode_saved(bytes(whole[:at]), TREE, len(marks)) is None
    whole[at] ^= 1 << data.draw(st.integers(0, 7))
    assert decode_saved(bytes(whole), TREE, len(marks)) is None
