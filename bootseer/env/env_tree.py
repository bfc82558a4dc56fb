"""The tree of a snapshot in its store, opened when it is needed: what is there already needs nothing of it.

In: the tree's URL and digest, which is all that is believed. Out: its index and a source of its blocks, those that
the node has already from its cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bootseer import aio
from bootseer.tree.index import Index
from bootseer.tree.reading import BlockSource

if TYPE_CHECKING:
    from bootseer.storage import Store
    from bootseer.tree.opening import OpenedTree


class OpenEnvTree(NamedTuple):
    """What unpacking takes."""

    tree: Index
    blocks: BlockSource


class EnvTree(Protocol):
    """A tree that can be opened."""

    @property
    def url(self) -> str:
        """Of the tree's folder, for mounts; "" for one that is in no store."""
        ...

    def open(self) -> AbstractContextManager[OpenEnvTree]:
        """Raises: NotFound, StorageError, IntegrityError, ConfigError."""
        ...


class StoredTree:
    """One in a store. Implements EnvTree."""

    def __init__(
        self,
        url: str,
        digest: str,
        *,
        options: Mapping[str, object] | None = None,
        environ: Mapping[str, str] | None = None,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args: url: with or without its digest. options: of the store. environ: says where the cache is. log: lines
            for what is done without.
        """
        self.url, self.digest = url, digest
        self._options, self._log = dict(options or {}), log
        self._environ = os.environ if environ is None else environ

    @contextmanager
    def open(self) -> Iterator[OpenEnvTree]:
        from bootseer.blocks import open_cache
        from bootseer.blocks.local import open_local
        from bootseer.storage import open_store
        from bootseer.tree.head import split_pin
        from bootseer.tree.opening import open_tree
        from bootseer.tree.reading import StoreBlocks
        from bootseer.trust import Trust

        cache = open_cache(self._environ, log=self._log)

        async def opened() -> tuple[Store, OpenedTree]:
            store = open_store(split_pin(self.url)[0], options=self._options)
            try:
                found = await open_tree(store, self.url, Trust(), digest=self.digest, cached=cache.read_index)
            except BaseException:
                await store.aclose()
                raise
            return store, found

        store, found = aio.run_sync(opened())
        try:
            stored = StoreBlocks(store, found.index)
            with open_local(cache, self.digest, found.index, stored, self._log) as blocks:
                yield OpenEnvTree(found.index, blocks)
        finally:
            aio.run_sync(store.aclose())
