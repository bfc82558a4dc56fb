"""Local dedup sources: blocks that other cached trees hold; a new version of an image shares most of them.

In: the wanted blocks, by the digest of their stored bytes. Out: the same block from one of the few trees that were
used last, read there with its checksums verified. Their indexes were verified when cached, and are verified here
again.
"""

from __future__ import annotations

import threading

import msgspec

from bootseer.blocks.cache import Cache
from bootseer.blocks.tree_cache import TreeCache
from bootseer.errors import BootseerError
from bootseer.logs import get_logger
from bootseer.tree.compression import decompress
from bootseer.tree.index import BLOCK, MAX_RAW_INDEX_BYTES, Index

_log = get_logger(__name__)

MAX_DEDUP_SOURCES = 3


class _Blocks(msgspec.Struct):
    """The part of an index that lists its blocks."""

    blocks: bytes


class DedupSources:
    """Trees of `cache` other than `tree` that may have blocks of `index`. Calls block; for one thread at a time.

    They are in use, and so not evicted, until `close`.
    """

    def __init__(
        self,
        cache: Cache,
        tree: str,
        index: Index,
        *,
        max_trees: int = MAX_DEDUP_SOURCES,
    ) -> None:
        self._cache, self._tree, self._index, self._max_trees = cache, tree, index, max_trees
        self._trees: list[TreeCache] = []
        self._found: dict[int, tuple[TreeCache, int]] = {}  # block of `index` -> where it is
        self._lock = threading.Lock()
        self._is_closed = False
        self.is_built = False

    def build(self) -> None:
        """Find out which blocks they have; once. An unreadable tree is left out."""
        try:
            self._build()
        except (BootseerError, OSError) as error:  # of any other tree; none of them is required
            _log.info("no blocks are taken from other trees: %s", error)
        self.is_built = True

    def has(self, number: int) -> bool:
        """Return whether a block of `index` may be there."""
        return number in self._found

    def try_read(self, number: int, raw_bytes: int) -> memoryview | None:
        """Return a verified block of `index`, `raw_bytes` long; None when it is no longer there."""
        found = self._found.get(number)
        return None if found is None else found[0].try_read_block(found[1], raw_bytes)

    def close(self) -> None:
        """Release the trees, also while another thread runs `build`."""
        with self._lock:
            self._is_closed = True
            self._found = {}
            trees, self._trees = self._trees, []
        for tree in trees:
            tree.close(saves=False)

    def _build(self) -> None:
        wanted: dict[bytes, int] | None = None
        others = [tree.digest for tree in self._cache.trees() if tree.digest != self._tree]
        for other in others[: self._max_trees]:
            data = self._cache.read_index(other)
            if data is None:
                continue
            blocks = _read_blocks(data, other)
            if wanted is None:
                ours = BLOCK.iter_unpack(self._index.blocks)
                wanted = {digest: number for number, (digest, *_) in enumerate(ours)}
            shared: dict[int, int] = {}  # number in the other tree -> number in this one
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
    raw = decompress(data, MAX_RAW_INDEX_BYTES, f"the cached index of {tree}")
    try:
        blocks = msgspec.msgpack.decode(raw, type=_Blocks).blocks
    except msgspec.MsgspecError:
        return b""
    return blocks[: len(blocks) // BLOCK.size * BLOCK.size]
