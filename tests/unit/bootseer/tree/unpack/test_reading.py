"""Blocks from a folder of packs: the right ones in any order, and whatever is wrong is asked of somebody else."""

from __future__ import annotations

import random
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from bootseer.errors import NotFound
from bootseer.tree.builder.building import SourceContents, build
from bootseer.tree.builder.packing import Packer
from bootseer.tree.index import BLOCK_BYTES, Index
from bootseer.tree.inodes import Inode
from bootseer.tree.unpack.reading import LocalBlocks
from tests.testing.trees import MemoryPacks

BLOCKS = 200


class Made:
    """A source of one file; some blocks can be compressed, some cannot."""

    name = ""

    def read(self, packer: Packer, hot_paths: object, on_progress: object) -> SourceContents:
        chance = random.Random(1)
        root, inode = Inode(stat.S_IFDIR | 0o755), Inode(stat.S_IFREG | 0o644)
        inode.size = BLOCKS * BLOCK_BYTES
        for number in range(BLOCKS):
            data = chance.randbytes(BLOCK_BYTES) if number % 3 else b"%08d" % number * (BLOCK_BYTES // 8)
            inode.add_pieces(packer.add(data), 1)
        assert root.children is not None
        root.children[b"file"] = inode
        return SourceContents(root)


class Others(MemoryPacks):
    """Says what it was asked for."""

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes]]:
        if not self.packs:
            raise NotFound("nobody has it")
        yield from super().read_blocks(numbers)


@pytest.fixture
def others(tmp_path: Path) -> Others:
    made = Others()
    made.index = build(Made(), made.put, threads=1).tree
    (tmp_path / "packs").mkdir()
    for digest, data in made.packs.items():
        (tmp_path / "packs" / digest).write_bytes(data)
    return made


def index_of(others: Others) -> Index:
    assert others.index is not None
    assert len(others.index.packs) > 1, "some neighbours lie in two packs"
    return others.index


@pytest.mark.parametrize("order", ["in order", "by chance", "with gaps", "none"])
def test_they_are_read_here(tmp_path: Path, others: Others, order: str) -> None:
    numbers = list(range(index_of(others).block_count))
    match order:
        case "by chance":
            random.Random(2).shuffle(numbers)
        case "with gaps":
            numbers = [number for number in numbers if number % 7 > 1]
        case "none":
            numbers = []
    wanted = {number: bytes(raw) for number, raw in others.read_blocks(numbers)}
    others.packs.clear()
    found = list(LocalBlocks(str(tmp_path), index_of(others), others).read_blocks(numbers))
    assert [number for number, _ in found] == numbers
    assert dict(found) == wanted, "their bytes are still there when the last one came"


@pytest.mark.parametrize("damage", ["a bit", "too short", "no pack", "a folder"])
def test_what_is_wrong_is_asked_of_others(tmp_path: Path, others: Others, damage: str) -> None:
    index = index_of(others)
    numbers = list(range(index.block_count))
    wanted = dict(others.read_blocks(numbers))
    others.asked.clear()
    path = tmp_path / index.pack_path(0)
    data = bytearray(path.read_bytes())
    of_pack = [number for number in numbers if index.block(number).pack == 0]
    match damage:
        case "a bit":
            damaged = index.block(of_pack[4])
            data[damaged.offset + damaged.stored_bytes - 1] ^= 1
            path.write_bytes(data)
            missing = {of_pack[4]}
        case "too short":
            path.write_bytes(data[:-1])
            missing = {of_pack[-1]}
        case "no pack":
            path.unlink()
            missing = set(of_pack)
        case "a folder":
            path.unlink()
            path.mkdir()
            missing = set(of_pack)
    found = dict(LocalBlocks(str(tmp_path), index, others).read_blocks(numbers))
    assert found == wanted
    assert missing <= set(others.asked) <= set(of_pack)
    assert len(others.asked) == len(set(others.asked)) <= max(len(missing), 32), "what lies together is asked for"


def test_what_nobody_has_is_an_error(tmp_path: Path, others: Others) -> None:
    index = index_of(others)
    others.packs.clear()
    (tmp_path / index.pack_path(0)).unlink()
    with pytest.raises(NotFound, match="nobody has it"):
        list(LocalBlocks(str(tmp_path), index, others).read_blocks(range(index.block_count)))
