"""Blocks that other cached trees have already: a new version of an image shares most of them with the last one.

In: what is wanted, by the digest of its stored bytes. Out: the same block in one of the few trees that were used
last, read from there with its sums checked. Their indexes were verified when they were cached, and are again here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec

from bootseer.blocks.cache import Cache
from bootseer.blocks.tree_cache import TreeCache
from bootseer.errors import BootseerError
from bootseer.tree.compression import decompress
from bootseer.tree.index import BLOCK, MOST_RAW_INDEX_BYTES, Index

MOST_DONORS = 3


class _Blocks(msgspec.Struct):
    """The part of an index that says what its blocks are."""

    blocks: bytes


class Donors:
    """Trees of `cache`, but for `tree`, that may have blocks of `index`. Calls block; for one thread at a time.

    They are in use, and so not evicted, until `close`.
    """

    def __init__(
        self,
        cache: Cache,
        tree: str,
        index: Index,
        *,
        most_trees: int = MOST_DONORS,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._cache, self._tree, self._index, self._most_trees, self._log = cache, tree, index, most_trees, log
        self._trees: list[TreeCache] = []
        self._found: dict[int, tuple[TreeCache, int]] = {}  # our block -> where it is
        self._lock = threading.Lock()
        self._is_closed = False
        self.is_built = False

    def build(self) -> None:
        """Finds out which blocks they have; once. What cannot be read is left out."""
        try:
            self._build()
        except (BootseerError, OSError) as error:  # of any other tree, and none of them is needed
            self._log(f"no blocks are taken from other trees: {error}")
        self.is_built = True

    def has(self, number: int) -> bool:
        """Whether a block of ours may be there."""
        return number in self._found

    def try_read(self, number: int, raw_bytes: int) -> memoryview | None:
        """A block of ours, `raw_bytes` long, its sums checked; None when it is not there any more."""
        found = self._found.get(number)
        return None if found is None else found[0].try_read_block(found[1], raw_bytes)

    def close(self) -> None:
        """Also while they are being built, by another thread."""
        with self._lock:
            self._is_closed = True
            self._found = {}
            trees, self._trees = self._trees, []
        for tree in trees:
            tree.close(saves=False)

    def _build(self) -> None:
        wanted: dict[bytes, int] | None = None
        others = [tree.digest for tree in self._cache.trees() if tree.digest != self._tree]
        for other in others[: self._most_trees]:
            data = self._cache.read_index(other)
            if data is None:
                continue
            blocks = _read_blocks(data, other)
            if wanted is None:
                ours = BLOCK.iter_unpack(self._index.blocks)
                wanted = {digest: number for number, (digest, *_) in enumerate(ours)}
            shared: dict[int, int] = {}  # theirs -> ours
            for theirs, (digest, _, _, stored_bytes, raw_bytes) in enumerate(BLOCK.iter_unpack(blocks)):
                number = wanted.get(digest)
                if number is not None and number not in self._found:
                    block = self._index.block(number)
                    if (block.stored_bytes, block.raw_bytes) == (stored_bytes, raw_bytes):
                        shared[theirs] = number
            if not shared:
                continue
            tree = self._cache.open_tree(other, len(blocks) // BLOCK.size, is_guest=True)
            with self._lock:
                if self._is_closed:
                    tree.close(saves=False)
                    return
                self._trees.append(tree)
                for theirs in shared.keys() - set(tree.missing(shared)):
                    self._found[shared[theirs]] = (tree, theirs)


def _read_blocks(data: bytes, tree: str) -> bytes:
    raw = decompress(data, MOST_RAW_INDEX_BYTES, f"the cached index of {tree}")
    try:
        blocks = msgspec.msgpack.decode(raw, type=_Blocks).blocks
    except msgspec.MsgspecError:
        return b""
    return blocks[: len(blocks) // BLOCK.size * BLOCK.size]
