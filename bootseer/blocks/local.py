"""Blocks that this node has already, for unpacking a tree: only missing blocks are read from a store.

In: the cache of the tree, if there is one, those of other trees, and a source of all blocks. Out: a `BlockSource`
of bootseer.tree.reading. Nothing is added to the cache: unpacked blocks are no longer needed there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from bootseer.blocks.cache import TREES, Cache
from bootseer.blocks.dedup_sources import DedupSources
from bootseer.blocks.tree_cache import TreeCache
from bootseer.errors import StorageError
from bootseer.logs import get_logger
from bootseer.tree.index import Index

if TYPE_CHECKING:
    from bootseer.tree.reading import BlockSource

_log = get_logger(__name__)


class LocalBlocks:
    """Blocks from `cache`, from `dedup_sources`, else from `others`. For any number of threads."""

    def __init__(
        self, index: Index, cache: TreeCache | None, dedup_sources: DedupSources, others: BlockSource
    ) -> None:
        self._index, self._cache, self._dedup_sources, self._others = index, cache, dedup_sources, others

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes | memoryview]]:
        """Yield blocks, those of this node first. Raises: as `others`."""
        missing = []
        for number in numbers:
            raw = self._try_read(number)
            if raw is None:
                missing.append(number)
            else:
                yield number, raw
        if missing:
            yield from self._others.read_blocks(missing)

    def _try_read(self, number: int) -> memoryview | None:
        raw_bytes = self._index.block(number).raw_bytes
        if self._cache is not None and self._cache.has(number):
            raw = self._cache.try_read_block(number, raw_bytes)
            if raw is not None:
                return raw
        return self._dedup_sources.try_read(number, raw_bytes)


@contextmanager
def open_local(cache: Cache, digest: str, index: Index, others: BlockSource) -> Iterator[LocalBlocks]:
    """Open the cache of the tree `digest` for use, which prevents its eviction. An unreadable one is ignored."""
    with ExitStack() as stack:
        kept: TreeCache | None = None
        if os.path.isdir(os.path.join(cache.folder, TREES, digest)):  # else it would be made
            try:
                kept = stack.enter_context(cache.open_tree(digest, index.block_count, is_guest=True))
            except StorageError as error:
                _log.info("cached blocks are not used: %s", error)
        dedup_sources = DedupSources(cache, digest, index)
        stack.callback(dedup_sources.close)
        dedup_sources.build()
        yield LocalBlocks(index, kept, dedup_sources, others)
