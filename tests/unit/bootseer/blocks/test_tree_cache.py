"""The cache of a tree: what it gives was checked, what is damaged is missing, what is full refuses."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from bootseer import crc
from bootseer.blocks.cache import Cache
from bootseer.blocks.presence import HEADER_BYTES
from bootseer.blocks.tree_cache import TreeCache
from bootseer.blocks.tree_files import BLOCK_CHECKSUMS, GRANULE_BYTES, TreeFiles, checksum_block
from bootseer.tree.index import BLOCK_BYTES
from tests.unit.bootseer.blocks.trees import Tree, fill_all, make_tree, open_cache, open_root

TREE = make_tree(12)
DEVICE = TREE.device()


@pytest.fixture
def root(tmp_path: Path) -> Cache:
    return open_root(tmp_path)


def directory_of(root: Cache, tree: Tree = TREE) -> Path:
    return Path(root.folder) / "trees" / tree.digest


def read(cache: TreeCache, offset: int, length: int) -> bytes | None:
    target = memoryview(bytearray(b"\xee" * length))
    return bytes(target) if cache.try_read(offset, target) else None


def flip(path: Path, at: int, mask: int = 1) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


# ---- reading -------------------------------------------------------------------------------------------------


def test_any_range_of_what_is_there_can_be_read(root: Cache) -> None:
    chance = random.Random(1)
    with open_cache(root, TREE) as cache:
        assert cache.size == len(DEVICE)
        fill_all(cache, TREE)
        edges = [0, 1, 4096, GRANULE_BYTES - 1, GRANULE_BYTES, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1]
        ranges = [(at, length) for at in edges for length in edges if length]
        ranges += [(chance.randrange(len(DEVICE)), chance.randrange(1, 3 * BLOCK_BYTES)) for _ in range(300)]
        ranges += [(at * 4096, 4096 * chance.randrange(1, 33)) for at in range(0, len(DEVICE) // 4096, 3)]
        for offset, length in ranges:
            if offset + length <= len(DEVICE):
                assert read(cache, offset, length) == DEVICE[offset : offset + length]
        assert read(cache, 0, len(DEVICE)) == DEVICE
        assert read(cache, 5, 0) == b""


def test_nothing_is_read_outside_the_device(root: Cache) -> None:
    with open_cache(root, TREE) as cache:
        fill_all(cache, TREE)
        assert read(cache, len(DEVICE) - 1, 2) is None
        assert read(cache, len(DEVICE), 1) is None
        assert read(cache, -1, 1) is None


def test_a_missing_block_makes_a_read_fail_wherever_it_is(root: Cache) -> None:
    with open_cache(root, TREE) as cache:
        for missing in range(3):
            for number in range(3):
                if number != missing:
                    cache.fill(number, TREE.raws[number])
        assert cache.missing(range(TREE.count)) == list(range(3, TREE.count))
    other = open_root(Path(root.folder).parent / "other")
    for missing in range(3):
        with open_cache(other, TREE) as cache:
            for number in {0, 1, 2} - {missing}:
                assert cache.fill(number, TREE.raws[number])
            assert read(cache, 0, 3 * BLOCK_BYTES) is None
            assert read(cache, missing * BLOCK_BYTES, 1) is None
        other.collect(0)


def test_handles_see_what_others_fill(root: Cache) -> None:
    with open_cache(root, TREE) as one, open_cache(root, TREE) as two:
        assert not two.has(4)
        one.fill(4, TREE.raws[4])
        assert two.has(4)
        assert two.missing([3, 4, 5]) == [3, 5]
        assert two.try_read_block(4, len(TREE.raws[4])) == TREE.raws[4]
    with open_cache(root, TREE) as three:
        assert three.has(4)
        assert three.statistics()["present"] == 1


def test_missing_keeps_the_order_and_looks_right_when_scattered(root: Cache) -> None:
    tree = make_tree([TREE.raws[0]] + [bytes(4096)] * 2000)
    with open_cache(root, tree) as cache:
        cache.fill(1999, tree.raws[1999])
        assert cache.missing([2000, 1999, 0]) == [2000, 0]
        assert cache.missing([1999, 0]) == [0]
        assert cache.missing([]) == []
        assert cache.missing(reversed(range(1990, 2001))) == [2000, *reversed(range(1990, 1999))]


def test_a_granule_whose_sum_is_zero_is_as_good_as_any(root: Cache) -> None:
    """CRC32C can be 0, and 0 stands for what is not known: such a granule must neither be lost nor be believed."""
    crc32c = crc.load()
    granule = bytearray(GRANULE_BYTES)
    # The sum is linear in the last four bytes: find those that make it 0.
    base = crc32c(bytes(granule))
    rows = []
    for bit in range(32):
        granule[-4:] = (1 << bit).to_bytes(4, "little")
        rows.append((crc32c(bytes(granule)) ^ base, 1 << bit))
    value, wanted = 0, base
    for bit in reversed(range(32)):  # elimination over bits
        pivot = next((row for row in rows if row[0] >> bit & 1), None)
        if pivot is None:
            continue
        rows = [
            (row[0] ^ pivot[0], row[1] ^ pivot[1]) if row[0] >> bit & 1 else row for row in rows if row != pivot
        ]
        if wanted >> bit & 1:
            wanted, value = wanted ^ pivot[0], value ^ pivot[1]
    granule[-4:] = value.to_bytes(4, "little")
    assert crc32c(bytes(granule)) == 0
    raw = bytes(granule) * 8
    assert checksum_block(crc32c, raw) == (1,) * 8
    tree = make_tree([TREE.raws[0], raw, TREE.raws[1]])
    with open_cache(root, tree) as cache:
        cache.fill(0, tree.raws[0])
        cache.fill(2, tree.raws[2])
        with open(directory_of(root, tree) / "data", "r+b") as file:
            file.seek(BLOCK_BYTES)
            file.write(raw)  # never filled, and its sum is that of the unknown
        assert read(cache, 0, 3 * BLOCK_BYTES) is None
        assert read(cache, BLOCK_BYTES, 10) is None
        cache.fill(1, raw)
        assert read(cache, 0, 3 * BLOCK_BYTES) == tree.device()
        flip(directory_of(root, tree) / "data", BLOCK_BYTES + 5 * GRANULE_BYTES)
        assert read(cache, BLOCK_BYTES, BLOCK_BYTES) is None


# ---- damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("data", 3 * BLOCK_BYTES + 70_000),
        ("sums", 3 * BLOCK_CHECKSUMS.size + 5),
        ("present", HEADER_BYTES + 3),
        ("present", 3),
        ("saved", 60),
        ("index", 10),
        ("lock", 0),
    ],
)
def test_a_flipped_bit_costs_a_fetch_and_nothing_else(root: Cache, name: str, at: int, is_open: bool) -> None:
    cache = open_cache(root, TREE)
    fill_all(cache, TREE)
    if not is_open:
        cache.close()
    if (directory_of(root) / name).exists() and (directory_of(root) / name).stat().st_size > at:
        flip(directory_of(root) / name, at, 0x10)
    if not is_open:
        cache = open_cache(root, TREE)
    with cache:
        for number in range(TREE.count):
            found = read(cache, number * BLOCK_BYTES, BLOCK_BYTES)
            assert found in (None, TREE.raws[number].ljust(BLOCK_BYTES, b"\0"))
            if found is None:
                assert cache.try_lock(number)
                if not cache.settle(number):
                    assert cache.fill(number, TREE.raws[number])
                cache.unlock(number)
        assert read(cache, 0, len(DEVICE)) == DEVICE


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("name", ["data", "sums", "present", "saved", "index", "lock"])
@pytest.mark.parametrize("kept", [0, 1, 50, -1, None])
def test_a_file_cut_off_or_gone_costs_fetches_and_nothing_else(
    root: Cache, name: str, kept: int | None, is_open: bool
) -> None:
    cache, other = open_cache(root, TREE), open_cache(root, TREE)  # the other one has seen nothing yet
    fill_all(cache, TREE)
    if not is_open:
        cache.close()
    path = directory_of(root) / name
    if path.exists():
        if kept is None:
            path.unlink()
        else:
            os.truncate(path, max(0, kept if kept >= 0 else path.stat().st_size - 1))
    for number in range(TREE.count):
        assert read(other, number * BLOCK_BYTES, 4096) in (None, DEVICE[number * BLOCK_BYTES :][:4096])
    other.close()
    if not is_open:
        cache = open_cache(root, TREE)
    with cache:
        assert root.read_index(TREE.digest) in (None, TREE.data)
        for number in range(TREE.count):
            if read(cache, number * BLOCK_BYTES, BLOCK_BYTES) is None:
                assert cache.try_lock(number)
                if not cache.settle(number):
                    assert cache.fill(number, TREE.raws[number])
                cache.unlock(number)
        assert read(cache, 0, len(DEVICE)) == DEVICE


def test_what_one_finds_damaged_another_may_have_repaired(root: Cache) -> None:
    with open_cache(root, TREE) as one, open_cache(root, TREE) as two:
        fill_all(one, TREE)
        flip(directory_of(root) / "data", 5 * BLOCK_BYTES)
        assert read(one, 5 * BLOCK_BYTES, 10) is None
        assert read(two, 5 * BLOCK_BYTES, 10) is None
        assert one.missing([4, 5]) == [5]
        assert one.try_lock(5)
        assert not two.try_lock(5)
        assert not one.settle(5)
        assert one.fill(5, TREE.raws[5])
        one.unlock(5)
        assert two.missing([4, 5]) == [5]  # as far as it knows
        assert two.try_lock(5)
        assert two.settle(5)
        two.unlock(5)
        assert two.missing([4, 5]) == []
        assert read(two, 5 * BLOCK_BYTES, 10) == TREE.raws[5][:10]
        assert one.statistics()["damaged"] == 1
        assert two.statistics()["damaged"] == 0


def test_a_short_block_is_followed_by_zeros_whatever_was_there(root: Cache) -> None:
    short = next(number for number, raw in enumerate(TREE.raws) if len(raw) < BLOCK_BYTES)
    with open_cache(root, TREE) as cache:
        with open(directory_of(root) / "data", "r+b") as file:
            file.seek(short * BLOCK_BYTES)
            file.write(b"x" * BLOCK_BYTES)
        cache.fill(short, TREE.raws[short])
        assert read(cache, short * BLOCK_BYTES, BLOCK_BYTES) == TREE.raws[short].ljust(BLOCK_BYTES, b"\0")


def test_what_is_no_block_is_refused(root: Cache) -> None:
    with open_cache(root, TREE) as cache:
        for number, raw in ((0, b""), (0, bytes(BLOCK_BYTES + 1)), (-1, b"x"), (TREE.count, b"x")):
            with pytest.raises(ValueError, match="block"):
                cache.fill(number, raw)


# ---- power cuts ------------------------------------------------------------------------------------------------


def test_after_another_boot_only_what_was_saved_counts(tmp_path: Path) -> None:
    before = open_root(tmp_path, boot_id="boot-1")
    with open_cache(before, TREE) as cache:
        for number in range(6):
            cache.fill(number, TREE.raws[number])
        cache.save()
        for number in range(6, 9):
            cache.fill(number, TREE.raws[number])
        cache.close(saves=False)
    after = open_root(tmp_path, boot_id="boot-2")
    with open_cache(after, TREE) as cache:
        assert cache.missing(range(TREE.count)) == list(range(6, TREE.count))
        assert read(cache, 0, 6 * BLOCK_BYTES) == DEVICE[: 6 * BLOCK_BYTES]
        cache.fill(7, TREE.raws[7])
    with open_cache(after, TREE) as cache:
        assert cache.missing(range(TREE.count)) == [6, 8, 9, 10, 11]
    with open_cache(open_root(tmp_path, boot_id="boot-3"), TREE) as cache:
        assert cache.missing(range(TREE.count)) == [6, 8, 9, 10, 11]  # saved at the close


def test_what_the_disk_had_not_got_is_found_even_if_it_was_marked(tmp_path: Path) -> None:
    """The kernel writes the map, the sums and the data when it likes."""
    root = open_root(tmp_path, boot_id="boot-1")
    with open_cache(root, TREE) as cache:
        fill_all(cache, TREE)
    with open(directory_of(root) / "data", "r+b") as file:
        file.truncate(3 * BLOCK_BYTES)
        file.truncate(len(DEVICE))
    with open(directory_of(root) / "sums", "r+b") as file:
        file.truncate(7 * BLOCK_CHECKSUMS.size)
        file.truncate(TREE.count * BLOCK_CHECKSUMS.size)
    with open_cache(open_root(tmp_path, boot_id="boot-2"), TREE) as cache:
        found = [read(cache, number * BLOCK_BYTES, 4096) for number in range(TREE.count)]
        assert [number for number, data in enumerate(found) if data is not None] == [0, 1, 2]


def test_a_kernel_that_does_not_say_its_boot_loses_what_is_not_saved(tmp_path: Path) -> None:
    root = open_root(tmp_path, boot_id="")
    with open_cache(root, TREE) as cache:
        cache.fill(1, TREE.raws[1])
        cache.save()
        cache.fill(2, TREE.raws[2])
        assert read(cache, 0, 10) is None
        assert cache.has(2)
        cache.close(saves=False)
    with open_cache(root, TREE) as cache:
        assert (cache.has(1), cache.has(2)) == (True, False)


# ---- several at once -------------------------------------------------------------------------------------------


def test_locks_are_of_handles_and_end_with_them(root: Cache) -> None:
    one, two = open_cache(root, TREE), open_cache(root, TREE)
    assert one.try_lock(3)
    assert one.try_lock(4)
    assert not two.try_lock(3)
    assert two.try_lock(5)
    one.unlock(3)
    assert two.try_lock(3)
    assert not two.try_lock(4)
    one.close()
    assert two.try_lock(4)
    two.close()


def test_readers_among_writers_see_right_bytes_or_none(root: Cache) -> None:
    tree = make_tree(40)
    device = tree.device()
    wrong: list[int] = []
    is_over = threading.Event()

    def look(seed: int) -> None:
        chance = random.Random(seed)
        with root.open_tree(tree.digest, tree.count) as cache:
            while not is_over.is_set():
                offset = chance.randrange(len(device) - BLOCK_BYTES)
                length = chance.choice((4096, 20_000, BLOCK_BYTES))
                found = read(cache, offset, length)
                if found is not None and found != device[offset : offset + length]:
                    wrong.append(offset)

    def write(cache: TreeCache, seed: int) -> None:
        order = list(range(tree.count))
        random.Random(seed).shuffle(order)
        for number in order:
            cache.fill(number, tree.raws[number])

    with open_cache(root, tree) as cache:
        readers = [threading.Thread(target=look, args=(seed,)) for seed in range(2)]
        writers = [threading.Thread(target=write, args=(cache, seed)) for seed in range(3)]
        for thread in readers + writers:
            thread.start()
        for thread in writers:
            thread.join()
        is_over.set()
        for thread in readers:
            thread.join()
        assert not wrong
        assert cache.missing(range(tree.count)) == []


def test_a_closed_cache_gives_and_takes_nothing(root: Cache) -> None:
    cache = open_cache(root, TREE)
    fill_all(cache, TREE)
    cache.close()
    cache.close()
    assert read(cache, 0, 4096) is None
    assert not cache.fill(0, TREE.raws[0])
    cache.save()


# ---- no room ---------------------------------------------------------------------------------------------------


def test_beyond_its_limit_it_keeps_nothing_and_says_so_once(tmp_path: Path, said: list[str]) -> None:
    from bootseer.cache_folder import Limit

    root = open_root(tmp_path, limit=Limit(max_bytes=0))
    with open_cache(root, TREE) as cache:
        assert not cache.fill(0, TREE.raws[0])
        assert not cache.fill(1, TREE.raws[1])
        assert cache.full_reason
        assert cache.missing(range(TREE.count)) == list(range(TREE.count))
        assert cache.statistics()["refused"] == 2
    assert len(said) == 1
    assert "limit" in said[0]


def test_advice_to_read_ahead_is_only_advice(root: Cache) -> None:
    with open_cache(root, TREE) as cache:
        fill_all(cache, TREE)
        cache.read_ahead([3, 4, 5, 1, 1, 10_000])
        assert read(cache, 0, len(DEVICE)) == DEVICE
    cache.read_ahead([1])


def test_saving_does_not_hold_up_the_end(root: Cache) -> None:
    """A disk that hangs in fdatasync: what is open for it stays open, and the tree in use, until it is done."""
    cache = open_cache(root, TREE)
    fill_all(cache, TREE)
    hangs, goes_on = threading.Event(), threading.Event()
    save = cache._save

    def hang(files: TreeFiles) -> None:
        hangs.set()
        assert goes_on.wait(10.0)
        save(files)

    cache._save = hang  # type: ignore[method-assign]
    thread = threading.Thread(target=cache.save)
    thread.start()
    assert hangs.wait(10.0)
    cache.close(saves=False)
    assert root.collect(0).trees == 0
    goes_on.set()
    thread.join()
    assert cache.statistics()["saves"] == 1
    assert root.collect(0).trees == 1


def test_an_empty_tree_is_a_tree(root: Cache) -> None:
    with root.open_tree("ab" * 32, 0) as cache:
        assert cache.size == 0
        assert cache.missing([]) == []
        assert read(cache, 0, 1) is None
