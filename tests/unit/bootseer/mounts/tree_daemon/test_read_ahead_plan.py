"""Which parts of which files are read ahead: exactly what lies in the hot blocks, under its path."""

from __future__ import annotations

import random
import stat
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.errors import IntegrityError
from bootseer.linux.cgroups import Memory
from bootseer.mounts.tree_daemon.prefetch_worker import BATCH_BLOCKS, ReadAhead, has_room
from bootseer.mounts.tree_daemon.read_ahead_plan import HotPieces
from bootseer.tree.builder.building import BuiltTree
from bootseer.tree.index import BLOCK_BYTES, BLOCK_UNITS, HOLE
from tests.unit.bootseer.tree.builder.test_building import built

SIZES = (0, 1, 4096, 5000, BLOCK_BYTES, BLOCK_BYTES + 1, 3 * BLOCK_BYTES + 77)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("source")
    chance = random.Random(5)
    for number in range(60):
        path = directory / f"{number % 3}" / f"{number % 5}" / f"file{number}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(chance.randbytes(chance.choice(SIZES)))
    with open(directory / "sparse", "wb") as file:
        file.seek(10 * BLOCK_BYTES)
        file.write(b"end")
    (directory / "0" / "link").symlink_to("../sparse")
    (directory / "hard").hardlink_to(directory / "sparse")
    return directory


@pytest.fixture(scope="module")
def tree(source: Path) -> BuiltTree:
    return built(source)[0]


def expected(tree: BuiltTree, hot: set[int]) -> set[tuple[bytes, int]]:
    """(path, offset) of each page in a hot block, counted page by page."""
    index, found = tree.tree, set()
    for entry, mode in enumerate(index.modes):
        if not stat.S_ISREG(mode) or index.links[entry] != -1:
            continue
        for offset, address, length in index.pieces(entry):
            for page in range(0, length, 4096):
                if address != HOLE and (address + page // 4096) // BLOCK_UNITS in hot:
                    found.add((index.path(entry), offset + page))
    return found


@given(st.data())
@settings(max_examples=20)
def test_exactly_what_lies_in_hot_blocks(tree: BuiltTree, source: Path, data: st.DataObject) -> None:
    count = tree.tree.block_count
    hot = data.draw(st.lists(st.integers(0, count - 1), unique=True))
    pieces = HotPieces(tree.index_bytes, tree.digest, hot).of(hot)
    pages: list[tuple[bytes, int]] = []
    for path, offset, length in pieces:
        assert 0 < length <= BLOCK_BYTES and offset + length <= (source / path.decode()).stat().st_size
        pages += [(path, page) for page in range(offset, offset + length, 4096)]
    assert len(pages) == len(set(pages)), "a page is read twice"
    assert set(pages) == expected(tree, set(hot))


def test_no_index() -> None:
    with pytest.raises(IntegrityError, match="the index of abc"):
        HotPieces(b"no index", "abc", [1])


def test_blocks_that_do_not_come_are_left_out(tree: BuiltTree, source: Path) -> None:
    every = list(range(tree.tree.block_count))
    pieces = HotPieces(tree.index_bytes, tree.digest, every)
    asked: list[int] = []

    def missing(batch: list[int]) -> list[int]:
        asked.append(len(batch))
        if len(asked) == 3:
            ahead.note_all()
        return [number for number in batch if number % 2]

    ahead = ReadAhead(str(source), lambda: pieces, every, missing)  # type: ignore[arg-type]
    ahead.prepare()
    ahead.run()
    batches = [every[at : at + BATCH_BLOCKS] for at in range(0, len(every), BATCH_BLOCKS)]
    wanted = sum(len(pieces.of([number for number in batch if not number % 2])) for batch in batches)
    assert ahead.files == wanted > 0
    assert len(asked) > len(batches), "it did not wait for blocks"


def test_files_that_are_not_there_end_it(tree: BuiltTree, tmp_path: Path) -> None:
    every = list(range(tree.tree.block_count))
    ahead = ReadAhead(str(tmp_path), partial(HotPieces, tree.index_bytes, tree.digest, every), every, lambda _: [])
    ahead.prepare()
    with pytest.raises(FileNotFoundError):
        ahead.run()


def test_room() -> None:
    assert has_room(4, Memory(1 << 30, 8 * BLOCK_BYTES, "the machine"))
    assert not has_room(5, Memory(1 << 30, 8 * BLOCK_BYTES, "the machine"))
