"""Which blocks come when: each once, hot files first and whole."""

from __future__ import annotations

import random
import stat

from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.tree.builder.building import SourceContents, build
from bootseer.tree.builder.packing import Packer
from bootseer.tree.index import BLOCK_BYTES, HOLE, Index
from bootseer.tree.inodes import Inode
from bootseer.tree.unpack.plan import batches, files_of, plan
from tests.testing.trees import MemoryPacks

sizes = st.lists(
    st.sampled_from([0, 1, 5000, 70_000, BLOCK_BYTES, BLOCK_BYTES + 1, 5 * BLOCK_BYTES + 9]), max_size=20
)


class Made:
    """A source of files with these sizes; some have holes, some are equal."""

    name = ""

    def __init__(self, lengths: list[int], seed: int) -> None:
        self._lengths, self._chance = lengths, random.Random(seed)

    def read(self, packer: Packer, hot_paths: object, on_progress: object) -> SourceContents:
        root = Inode(stat.S_IFDIR | 0o755)
        assert root.children is not None
        for number, length in enumerate(self._lengths):
            inode = root.children[b"%03d" % number] = Inode(stat.S_IFREG | 0o644)
            inode.size = length
            for begin in range(0, length, BLOCK_BYTES):
                data = random.Random(self._chance.randrange(12)).randbytes(min(BLOCK_BYTES, length - begin))
                inode.add_pieces(packer.add(data if self._chance.random() < 0.8 else bytes(len(data))), 1)
        return SourceContents(root)


def index_of(lengths: list[int], seed: int) -> Index:
    return build(Made(lengths, seed), MemoryPacks().put, threads=1).tree


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(0, 1000), st.data())
def test_every_block_once_and_hot_files_first(lengths: list[int], seed: int, data: st.DataObject) -> None:
    index = index_of(lengths, seed)
    hot = data.draw(
        st.lists(st.integers(0, max(0, index.block_count - 1)), unique=True, max_size=index.block_count)
    )
    files = files_of(index)
    wanted = [entry for entry in files if data.draw(st.booleans())]
    found = plan(index, wanted, hot)
    expected: dict[int, list[tuple[int, int, int, int]]] = {}
    for entry in wanted:
        for offset, address, length in index.pieces(entry):
            if address != HOLE:
                expected.setdefault(address // 32, []).append((entry, offset, address % 32 * 4096, length))
    assert {block: [tuple(write) for write in writes] for block, writes in found.writes.items()} == expected
    both = found.hot_blocks + found.cold_blocks
    assert sorted(both) == sorted(expected)
    assert found.cold_blocks == sorted(found.cold_blocks)
    assert found.pieces == {
        entry: sum(each[0] == entry for pairs in expected.values() for each in pairs) for entry in wanted
    }
    of_hot_files = {
        block for block, pairs in expected.items() if any(each[0] in found.hot_files for each in pairs)
    }
    assert of_hot_files == set(found.hot_blocks), "they are whole by then, and nothing else is fetched"
    touched = [block for block in hot if block in of_hot_files]
    assert found.hot_blocks[: len(touched)] == touched
    for entry in wanted:
        own = {
            address // 32
            for _, address, length in index.pieces(entry)
            if address != HOLE and length == BLOCK_BYTES
        }
        if own & set(hot):
            assert entry in found.hot_files
    assert [sorted(both[begin : begin + 7]) for begin in range(0, len(both), 7)] == list(batches(both, 7))


def test_a_last_piece_among_small_files_makes_no_large_file_hot() -> None:
    index = index_of([5 * BLOCK_BYTES + 9, 5000, 5000], 3)
    large, small, _ = files_of(index)
    shared = index.runs[small][0] // 32
    assert list(index.pieces(large))[-1][1] // 32 == shared
    found = plan(index, files_of(index), [shared])
    assert found.hot_blocks == [shared]
    assert large not in found.hot_files
    assert small in found.hot_files
