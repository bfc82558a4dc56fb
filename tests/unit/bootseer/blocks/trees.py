"""Small trees for tests of blocks: an index, its packs, and what every block has in it."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.blocks.cache import Cache
from bootseer.blocks.tree_cache import TreeCache
from bootseer.cache_folder import Limit
from bootseer.tree import compression
from bootseer.tree.block_codec import block_digest, pack_block
from bootseer.tree.index import BLOCK, BLOCK_BYTES, UNIT_BYTES, Index, digest_of, encode
from tests.testing.faulty_store import Fault, FaultyStore
from tests.unit.bootseer.storage.slow_store import SlowStore


class Tree(NamedTuple):
    """A tree as it is in a store."""

    index: Index
    data: bytes  # the index object
    digest: str
    packs: dict[str, bytes]  # by path
    raws: list[bytes]  # of each block

    @property
    def count(self) -> int:
        return len(self.raws)

    def device(self) -> bytes:
        """What all blocks form."""
        return b"".join(raw.ljust(BLOCK_BYTES, b"\0") for raw in self.raws)


def make_raw(seed: object, *, is_short: bool = False, is_plain: bool = False) -> bytes:
    """A block; plain ones do not compress, the others do, about 4:1."""
    chance = random.Random(repr(seed))
    size = chance.randrange(1, BLOCK_BYTES // UNIT_BYTES) * UNIT_BYTES if is_short else BLOCK_BYTES
    return chance.randbytes(size) if is_plain else (chance.randbytes(size // 4) * 4)[:size]


def make_tree(raws: Sequence[bytes] | int, *, pack_bytes: int = 512 << 10, source: str = "a test") -> Tree:
    """A tree of these blocks, or of so many; a pack ends with the block that makes it `pack_bytes` or more.

    About half of them are LZ4 frames: by their content, so that equal ones are stored alike.
    """
    if isinstance(raws, int):
        raws = [make_raw((source, n), is_short=n % 5 == 4, is_plain=n % 3 == 0) for n in range(raws)]
    blocks, packs, pack = bytearray(), [], bytearray()
    for number, raw in enumerate(raws):
        stored = pack_block(raw, "lz4" if raw[0] % 2 else "zstd")
        blocks += BLOCK.pack(block_digest(stored), len(packs), len(pack), len(stored), len(raw))
        pack += stored
        if len(pack) >= pack_bytes or number == len(raws) - 1:
            packs.append(bytes(pack))
            pack.clear()
    index = Index(
        tool="test",
        source=source,
        packs=[(hashlib.sha256(pack).digest(), len(pack)) for pack in packs],
        blocks=bytes(blocks),
        parents=[0],
        names=[b""],
        modes=[0o40755],
        uids=[0],
        gids=[0],
        mtimes_ns=[0],
        sizes=[0],
        runs=[[]],
        targets=[b""],
        links=[-1],
    )
    data = compression.compress(encode(index))
    by_path = {index.pack_path(number): pack for number, pack in enumerate(packs)}
    return Tree(index, data, digest_of(data), by_path, list(raws))


def make_store(tree: Tree, *plan: Fault, latency_s: float = 0.0, rate: float = 1e12) -> FaultyStore:
    """A store of its packs that takes (real) time and fails as planned."""
    store = SlowStore({}, latency_s=latency_s, rate=rate, has_replicas=False)
    store.files = dict(tree.packs)
    return FaultyStore(store, plan)


def open_root(directory: str | os.PathLike[str], **options: object) -> Cache:
    """A cache in a folder of a test, without a limit."""
    return Cache(os.path.join(directory, "cache"), **{"limit": Limit(share=1.0), **options})  # type: ignore[arg-type]


def open_cache(root: Cache, tree: Tree) -> TreeCache:
    """The cache of a tree, with its index."""
    cache = root.open_tree(tree.digest, tree.count)
    root.write_index(tree.digest, tree.data)
    return cache


def fill_all(cache: TreeCache, tree: Tree) -> None:
    for number, raw in enumerate(tree.raws):
        assert cache.fill(number, raw)


def assert_right(raws: Mapping[int, memoryview | bytes], tree: Tree) -> None:
    for number, raw in raws.items():
        assert raw == tree.raws[number], f"block {number}"
