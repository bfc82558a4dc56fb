"""What each process gets: every file once, with its further names and the folders on the way, and nothing else."""

from __future__ import annotations

import random
import stat

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.tree.builder.building import SourceContents, build
from bootseer.tree.builder.packing import Packer
from bootseer.tree.index import BLOCK_BYTES, HOLE, Index, check
from bootseer.tree.inodes import Inode
from bootseer.tree.unpack import portions as materialise_portions
from bootseer.tree.unpack.plan import files_of
from bootseer.tree.unpack.portions import MIN_COST_BYTES, Portion, portions
from tests.testing.trees import MemoryPacks

SIZES = (0, 1, 5000, 70_000, BLOCK_BYTES, BLOCK_BYTES + 1, 9 * BLOCK_BYTES + 9)


class Made:
    """A source of folders, files, holes and hard links, by chance."""

    name = ""

    def __init__(self, seed: int, entries: int) -> None:
        self._chance, self._entries = random.Random(seed), entries

    def read(self, packer: Packer, hot_paths: object, on_progress: object) -> SourceContents:
        chance = self._chance
        root = Inode(stat.S_IFDIR | 0o755)
        directories, files = [root], []
        for number in range(self._entries):
            above = chance.choice(directories).children
            assert above is not None
            roll = chance.random()
            if roll < 0.2:
                inode = Inode(stat.S_IFDIR | 0o755)
                directories.append(inode)
            elif roll < 0.35 and files:
                inode = chance.choice(files)
            elif roll < 0.4:
                inode = Inode(stat.S_IFLNK | 0o777)
                inode.target = b"somewhere"
            else:
                inode = Inode(stat.S_IFREG | 0o644, mtime_ns=number)
                inode.size = chance.choice(SIZES)
                inode.xattrs = [(b"user.x", b"%d" % number)] if chance.random() < 0.1 else []
                for begin in range(0, inode.size, BLOCK_BYTES):
                    length = min(BLOCK_BYTES, inode.size - begin)
                    is_hole = chance.random() < 0.2
                    inode.add_pieces(packer.add(bytes(length) if is_hole else chance.randbytes(length)), 1)
                files.append(inode)
            above[b"%03d" % number] = inode
        return SourceContents(root)


def links_of(index: Index) -> dict[int, list[int]]:
    links: dict[int, list[int]] = {}
    for entry, link in enumerate(index.links):
        if link != -1:
            links.setdefault(link, []).append(entry)
    return links


def rows(index: Index, *, of_files: bool) -> dict[bytes, object]:
    """By path, all that counts."""
    return {
        index.path(entry): (
            index.modes[entry],
            index.mtimes_ns[entry],
            index.sizes[entry],
            index.runs[entry],
            index.xattrs.get(entry),
            index.path(index.links[entry]) if index.links[entry] != -1 else None,
        )
        for entry in range(len(index))
        if stat.S_ISREG(index.modes[entry]) == of_files
    }


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10_000), st.integers(0, 60), st.integers(1, 4), st.sampled_from([1, 1 << 18, 1 << 30]))
def test_every_file_once_with_all_its_names(seed: int, entries: int, count: int, least: int) -> None:
    index = build(Made(seed, entries), MemoryPacks().put, threads=1).tree
    before, materialise_portions.MIN_COST_BYTES = MIN_COST_BYTES, least
    try:
        found = list(portions(index, files_of(index), links_of(index), count))
    finally:
        materialise_portions.MIN_COST_BYTES = before
    files: dict[bytes, object] = {}
    directories = rows(index, of_files=False)
    for portion in found:
        check_alone(portion, index)
        own = rows(portion.tree, of_files=True)
        assert not files.keys() & own.keys(), "no name is made twice"
        files.update(own)
        assert portion.files == len(files_of(portion.tree)) > 0
        for path, row in rows(portion.tree, of_files=False).items():
            assert directories[path] == row
        wanted = {path[: at if at > 0 else 0] for path in own for at in places_of(path)} | {b""}
        assert rows(portion.tree, of_files=False).keys() == wanted, "folders on the way, and no others"
    assert files == rows(index, of_files=True)


def places_of(path: bytes) -> list[int]:
    return [at for at, byte in enumerate(path) if byte == ord("/")]


def check_alone(portion: Portion, index: Index) -> None:
    """It is a tree like any other, once it has the blocks."""
    check(msgspec.structs.replace(portion.tree, packs=index.packs, blocks=index.blocks), "a portion")
    data = [
        length
        for entry in files_of(portion.tree)
        for _, address, length in portion.tree.pieces(entry)
        if address != HOLE
    ]
    assert portion.written_bytes == sum(data)


def test_large_files_come_first_and_portions_get_smaller() -> None:
    """So that nobody begins with the largest one when the others are done."""
    count = 4000
    index = Index(
        tool="", packs=[], blocks=b"", parents=[0] * (count + 1),
        names=[b"", *(b"%05d" % number for number in range(count))],
        modes=[stat.S_IFDIR | 0o755, *[stat.S_IFREG | 0o644] * count],
        uids=[0] * (count + 1), gids=[0] * (count + 1), mtimes_ns=[0] * (count + 1),
        sizes=[0, *[1 << 20] * (count - 2), 3 << 30, 2 << 30],
        runs=[[], *[[32 * n, 8] for n in range(count - 2)], [32 * count, 3 << 13], [64 * count, 2 << 13]],
        targets=[b""] * (count + 1), links=[-1] * (count + 1),
    )  # fmt: skip
    found = list(portions(index, files_of(index), {}, 2))
    sizes = [portion.written_bytes for portion in found]
    assert sizes[:2] == [3 << 30, 2 << 30]
    assert sizes[2:] == sorted(sizes[2:], reverse=True)
    assert 10 < len(sizes) < 60
    assert sizes[-2] < 2 * MIN_COST_BYTES
