"""Stored blocks: whatever goes in comes out, whatever else comes in ends in one error, and no more is made."""

from __future__ import annotations

import hashlib
import os
import random
import tracemalloc

import lz4.frame
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import IntegrityError
from bootseer.tree import block_codec
from bootseer.tree.block_codec import MIN_SAVING, Codec, block_digest, pack_block, unpack_block, version
from bootseer.tree.index import BLOCK_BYTES, UNIT_BYTES

CODECS: list[Codec] = ["zstd", "lz4"]
TEXT = b"".join(b"%d bottles of beer\n" % number for number in range(9000))[:BLOCK_BYTES]


@pytest.mark.parametrize("codec", CODECS)
@given(
    units=st.integers(1, BLOCK_BYTES // UNIT_BYTES),
    seed=st.integers(0, 1 << 32),
    share=st.sampled_from([0.0, 0.2, 0.9, 1.0]),
)
def test_what_goes_in_comes_out(codec: Codec, units: int, seed: int, share: float) -> None:
    chance = random.Random(seed)
    length = units * UNIT_BYTES
    noise = int(length * share)
    data = chance.randbytes(noise) + (TEXT * 2)[: length - noise]
    stored = pack_block(data, codec)
    assert len(stored) <= length
    assert bytes(unpack_block(memoryview(stored), length, "it")) == data
    assert len(block_digest(stored)) == 32


@pytest.mark.parametrize("codec", CODECS)
@given(data=st.binary(max_size=3000), zeros=st.integers(0, 100))
def test_blocks_are_kept_as_they_are_where_that_saves_little(codec: Codec, data: bytes, zeros: int) -> None:
    raw = data + bytes(zeros)
    found = pack_block(raw, codec)
    if len(found) == len(raw):
        assert found == raw
    else:
        assert len(found) <= len(raw) - len(raw) // MIN_SAVING
        assert unpack_block(found, len(raw), "it") == raw


@pytest.mark.parametrize("codec", CODECS)
def test_what_saves_little_is_stored_as_it_is(codec: Codec) -> None:
    data = random.Random(1).randbytes(BLOCK_BYTES)
    assert pack_block(data, codec) == data
    assert block_digest(data) == hashlib.sha256(data).digest()


def test_the_frame_says_what_its_digest_is() -> None:
    small, quick = pack_block(TEXT, "zstd"), pack_block(TEXT, "lz4")
    assert small[:4] == b"\x28\xb5\x2f\xfd"
    assert block_digest(small) == hashlib.sha256(small).digest()
    assert quick[:4] == b"\x04\x22\x4d\x18"
    assert block_digest(memoryview(quick)) == blake3(quick).digest()


def test_a_file_that_begins_as_an_lz4_frame_is_stored_as_any_other() -> None:
    data = b"\x04\x22\x4d\x18" + random.Random(2).randbytes(BLOCK_BYTES - 4)
    for codec in CODECS:
        stored = pack_block(data, codec)
        assert stored == data
        assert block_digest(stored) == block_digest(data)
        assert unpack_block(stored, BLOCK_BYTES, "it") == data


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("other", [-UNIT_BYTES, -1, 1, UNIT_BYTES])
def test_another_length_than_that_of_the_index_is_refused(codec: Codec, other: int) -> None:
    data = TEXT[: BLOCK_BYTES // 2]
    with pytest.raises(IntegrityError, match=r"^it: (claims to hold|holds) \d+ bytes|^it: is not one LZ4 frame"):
        unpack_block(pack_block(data, codec), len(data) + other, "it")


@pytest.mark.parametrize("codec", CODECS)
def test_what_was_cut_or_changed_gives_other_bytes_or_one_error(codec: Codec) -> None:
    chance = random.Random(3)
    stored = pack_block(TEXT, codec)
    for _ in range(300):
        wrong = bytearray(stored)
        if chance.random() < 0.3:
            del wrong[chance.randrange(1, len(wrong)) :]
        else:
            wrong[chance.randrange(len(wrong))] ^= 1 << chance.randrange(8)
        assert block_digest(wrong) != block_digest(stored)
        try:
            assert len(unpack_block(bytes(wrong), BLOCK_BYTES, "it")) == BLOCK_BYTES
        except IntegrityError as error:
            assert str(error).startswith("it: ")
    assert unpack_block(stored, BLOCK_BYTES, "it") == TEXT, "what a wrong one leaves does not hurt the next"


@pytest.mark.parametrize("more", [b"x", b"\x04\x22\x4d\x18", lz4.frame.compress(b"more")])
def test_one_frame_and_nothing_after_it(more: bytes) -> None:
    with pytest.raises(IntegrityError, match="is not one LZ4 frame of 131072 bytes"):
        unpack_block(pack_block(TEXT, "lz4") + more, BLOCK_BYTES, "it")


@pytest.mark.parametrize("store_size", [False, True])
def test_a_frame_that_holds_much_makes_no_more_than_a_block(store_size: bool) -> None:
    bomb = lz4.frame.compress(bytes(64 << 20), store_size=store_size, block_size=lz4.frame.BLOCKSIZE_MAX4MB)
    tracemalloc.start()
    try:
        with pytest.raises(IntegrityError):
            unpack_block(bomb, BLOCK_BYTES, "it")
        assert tracemalloc.get_traced_memory()[1] < 4 * BLOCK_BYTES
    finally:
        tracemalloc.stop()


def test_frames_that_are_none() -> None:
    for data in (
        b"",
        b"\x04\x22\x4d\x18",
        b"\x04\x22\x4d\x18" + b"\xff" * 40,
        b"\x28\xb5\x2f\xfd",
        os.urandom(99),
    ):
        with pytest.raises(IntegrityError, match=r"^it: "):
            unpack_block(data, UNIT_BYTES, "it")


def test_a_version_names_what_decides_the_bytes() -> None:
    assert version("zstd").startswith("zstd " + ".".join(map(str, zstandard.ZSTD_VERSION)))
    assert version("lz4").startswith(f"lz4 {lz4.library_version_string()} level ")


def test_an_import_that_another_thread_is_about_to_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python marks a submodule as initialised before it is an attribute of its package."""
    stored = pack_block(TEXT, "lz4")
    block_codec._lz4_frame.cache_clear()
    monkeypatch.delattr(lz4, "frame")
    assert unpack_block(stored, len(TEXT), "x") == TEXT
