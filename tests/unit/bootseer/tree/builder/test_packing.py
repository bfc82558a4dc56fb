"""Pieces in blocks and packs: what lies where, each thing once, the same bytes however many threads there are."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bootseer.errors import StorageError
from bootseer.tree.block_codec import unpack_block
from bootseer.tree.builder import packing
from bootseer.tree.builder.packing import PackedPieces, Packer
from bootseer.tree.index import BLOCK, BLOCK_BYTES, BLOCK_UNITS, HOLE, UNIT_BYTES

KIB = 1024


class Sink:
    """Packs in memory."""

    def __init__(self) -> None:
        self.packs: dict[str, bytes] = {}

    def put(self, digest: str, data: bytes) -> None:
        assert digest not in self.packs
        self.packs[digest] = data

    def blocks(self, packed: PackedPieces) -> list[bytes]:
        """Raw bytes of all blocks, after every check that a reader makes."""
        assert [(bytes.fromhex(digest), len(data)) for digest, data in self.packs.items()] == sorted(
            packed.packs, key=lambda pack: list(self.packs).index(pack[0].hex())
        )
        raws = []
        end, last = 0, 0
        for digest, pack, offset, stored, raw in BLOCK.iter_unpack(packed.blocks):
            if pack != last:
                assert (pack, end) == (last + 1, packed.packs[last][1])
                assert end >= packing.PACK_BYTES
                end, last = 0, pack
            assert offset == end, "nothing between blocks, in order"
            end += stored
            data = self.packs[packed.packs[pack][0].hex()][offset : offset + stored]
            assert hashlib.sha256(data).digest() == digest
            raws.append(unpack_block(data, raw, "block"))
            assert len(raws[-1]) == raw
        if raws:
            assert (last + 1, end) == (len(packed.packs), packed.packs[last][1])
        return raws


def pack(pieces: Sequence[bytes], *, threads: int = 2, later: Sequence[bytes] = ()) -> tuple[PackedPieces, Sink]:
    sink = Sink()
    with Packer(sink.put, threads=threads) as packer:
        for number, piece in enumerate(pieces):
            assert packer.add(piece) == number
        if later:
            assert packer.add_later(len(later), lambda: later) == len(pieces)
        return packer.finish(), sink


def at(raws: Sequence[bytes], address: int, length: int) -> bytes:
    block, inside = divmod(address, BLOCK_UNITS)
    return raws[block][inside * UNIT_BYTES : inside * UNIT_BYTES + length]


def piece(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


lengths = st.sampled_from([1, 4095, 4096, 4097, 8192, 65536, 126976, 131071, 131072])
pieces = st.lists(st.tuples(st.integers(0, 3), lengths, st.sampled_from(["zeros", "random", "text"])), max_size=60)


@settings(deadline=None, max_examples=60)
@given(pieces, st.integers(0, 60))
@example([(0, BLOCK_BYTES, "random")] * 3, 1)
def test_every_piece_is_where_it_is_said_to_be(made, later: int) -> None:
    data = []
    for seed, length, kind in made:
        if kind == "zeros":
            data.append(bytes(length))
        elif kind == "text":
            data.append((b"%d words " % seed * length)[:length])
        else:
            data.append(piece(seed, length))
    packed, sink = pack(data[:later], later=data[later:])
    raws = sink.blocks(packed)
    assert len(packed.addresses) == len(data)
    used: dict[int, bytes] = {}  # unit -> what is in it
    for address, expected in zip(packed.addresses, data, strict=True):
        if not expected.strip(b"\0"):
            assert address == HOLE
            continue
        assert at(raws, address, len(expected)) == expected
        if len(expected) == BLOCK_BYTES:
            assert address % BLOCK_UNITS == 0
        units = -(-len(expected) // UNIT_BYTES)
        assert address // BLOCK_UNITS == (address + units - 1) // BLOCK_UNITS, "in one block"
        padded = expected + bytes(units * UNIT_BYTES - len(expected))
        assert at(raws, address, len(padded)) == padded, "zeros up to the next unit"
        assert used.setdefault(address, expected) == expected
    assert sum(map(len, raws)) == sum(-(-len(each) // UNIT_BYTES) * UNIT_BYTES for each in used.values())
    assert packed.deduplicated_bytes == sum(len(each) for each in data if each.strip(b"\0")) - sum(
        map(len, used.values())
    )


def test_equal_pieces_are_stored_once() -> None:
    whole, short = piece(1, BLOCK_BYTES), piece(2, 5000)
    packed, sink = pack([whole, short, whole, short, bytes(BLOCK_BYTES), whole])
    a, b = packed.addresses[:2]
    assert list(packed.addresses) == [a, b, a, b, HOLE, a]
    assert len(sink.blocks(packed)) == 2
    assert packed.deduplicated_bytes == 2 * BLOCK_BYTES + 5000


def test_neighbours_share_blocks_in_order() -> None:
    small = [piece(number, 3000) for number in range(BLOCK_UNITS * 2)]
    packed, _ = pack(small)
    assert list(packed.addresses) == list(range(BLOCK_UNITS * 2))


def test_first_fit_over_few_open_blocks() -> None:
    """A piece that does not fit opens a block; later ones fill the gaps; the fullest is given up first."""
    sizes = [20, 20, 20, 20, 12, 10, 20]  # in units
    packed, _ = pack([piece(number, size * UNIT_BYTES) for number, size in enumerate(sizes)])
    blocks = [address // BLOCK_UNITS for address in packed.addresses]
    assert blocks[0] == blocks[4] == 0, "full: it is written first"
    assert blocks[1] == blocks[5]
    assert len(set(blocks)) == 5
    packed, _ = pack([piece(number, size * UNIT_BYTES) for number, size in enumerate([18, 20, 24, 19, 25])])
    assert [address // BLOCK_UNITS for address in packed.addresses].index(0) == 2


def test_packs_end_with_the_block_that_fills_them(monkeypatch) -> None:
    monkeypatch.setattr(packing, "PACK_BYTES", 300 * KIB)
    packed, sink = pack([piece(number, BLOCK_BYTES) for number in range(8)])
    assert [size for _, size in packed.packs] == [3 * BLOCK_BYTES, 3 * BLOCK_BYTES, 2 * BLOCK_BYTES]
    assert len(sink.blocks(packed)) == 8


def test_same_bytes_with_any_number_of_threads() -> None:
    chance = random.Random(7)
    data = [piece(chance.randrange(30), chance.choice([100, 5000, 70_000, BLOCK_BYTES])) for _ in range(400)] + [
        b"text " * chance.randrange(1, 25_000) for _ in range(50)
    ]
    packed, sink = pack(data, threads=1)
    for threads in (2, 7):
        again, other = pack(data, threads=threads)
        assert again == packed
        assert other.packs.keys() == sink.packs.keys()


def test_nothing_at_all() -> None:
    packed, sink = pack([])
    assert (list(packed.addresses), packed.blocks, packed.packs, sink.packs) == ([], b"", [], {})


def test_error_of_the_sink_comes_out(monkeypatch) -> None:
    monkeypatch.setattr(packing, "PACK_BYTES", BLOCK_BYTES)
    puts = []

    def put(digest: str, _: bytes) -> None:
        puts.append(digest)
        raise StorageError("full")

    with pytest.raises(StorageError, match="full"), Packer(put) as packer:
        for number in range(10_000):
            packer.add(piece(number % 50, BLOCK_BYTES) if number < 50 else piece(number, 4000))
        packer.finish()
    assert len(puts) <= packing.PUTS, "no further pack was begun"


def test_error_of_reading_comes_out() -> None:
    def read() -> list[bytes]:
        raise StorageError("gone")

    with pytest.raises(StorageError, match="gone"), Packer(lambda *_: None) as packer:
        packer.add_later(3, read)
        packer.finish()


@pytest.mark.leaks
def test_what_is_in_memory_is_bounded(monkeypatch) -> None:
    """While the sink is stuck, the packer takes only so many pieces and then waits for it."""
    monkeypatch.setattr(packing, "PACK_BYTES", 1 << 20)
    goes_on = threading.Event()
    added = []

    def put(_: str, __: bytes) -> None:
        assert goes_on.wait(60)

    def feed() -> None:
        with Packer(put, threads=2) as packer:
            for number in range(600):
                packer.add(piece(number, BLOCK_BYTES))
                added.append(number)
            packer.finish()

    thread = threading.Thread(target=feed)
    thread.start()
    try:
        last = -1
        while len(added) != last:  # it has come to rest
            last = len(added)
            thread.join(0.3)
        # Packs with the sink and the one that is full, tasks, and what settles with them.
        assert last < (packing.PUTS + 1) * 8 + 8 * (2 * 2 + 2) + 16 + packing.MAX_WAITING
        assert last < 600
    finally:
        goes_on.set()
        thread.join(60)
    assert len(added) == 600


@settings(deadline=None, max_examples=60)
@given(pieces, pieces, st.sampled_from([1, 3]))
def test_what_is_divided_shares_no_block(hot, cold, threads: int) -> None:
    """But for pieces that are the same, which are stored once."""
    one, two = ([piece(seed, length) for seed, length, _ in made] for made in (hot, cold))
    sink = Sink()
    with Packer(sink.put, threads=threads) as packer:
        for each in one:
            packer.add(each)
        packer.end_blocks()
        for each in two:
            packer.add(each)
        packed = packer.finish()
    raws = sink.blocks(packed)
    for address, expected in zip(packed.addresses, [*one, *two], strict=True):
        assert at(raws, address, len(expected)) == expected
    blocks = [address // BLOCK_UNITS for address in packed.addresses]
    hot_blocks = set(blocks[: len(one)])
    assert max(hot_blocks, default=-1) + 1 == len(hot_blocks), "they come first"
    for block, expected in zip(blocks[len(one) :], two, strict=True):
        assert block not in hot_blocks or expected in one


def test_where_it_is_divided_does_not_depend_on_threads() -> None:
    made = [piece(seed, 1000 + 4096 * (seed % 9)) for seed in range(300)]
    found = []
    for threads in (1, 4):
        sink = Sink()
        with Packer(sink.put, threads=threads) as packer:
            for number, each in enumerate(made):
                if number in (0, 7, 7, 150):
                    packer.end_blocks()
                packer.add(each)
            packer.end_blocks()
            found.append((packer.finish(), sink.packs))
    assert found[0] == found[1]
