"""The tree of a snapshot in its store, opened when it is needed: what is there already needs nothing of it.

In: the tree's URL and digest, which is all that is believed. Out: its index and a source of its blocks, those that
the node has already from its cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bootseer.storage.near import folder_of, near_folder_of

if TYPE_CHECKING:
    from bootseer.storage import Store
    from bootseer.tree.index import Index
    from bootseer.tree.opening import OpenedTree
    from bootseer.tree.reading import BlockSource


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
        peers: str = "",
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args: url: with or without its digest. options: of the store. environ: says where the cache is. peers: path
            of the file of the job's peers (bootseer.peers), "" for none. log: lines for what is done without.
        """
        self.url, self.digest = url, digest
        self.options, self._log, self._peers = dict(options or {}), log, peers
        self._environ = os.environ if environ is None else environ

    @property
    def is_in_files(self) -> bool:
        """Whether it is read from a folder, here or mounted here, and from no other node."""
        return bool(folder_of(self.store_url)) and not self.has_peers

    @property
    def has_peers(self) -> bool:
        """Whether other nodes of the job are asked for it before its store is."""
        return bool(self._peers) and not self._near_folder()

    @contextmanager
    def open(self) -> Iterator[OpenEnvTree]:
        from bootseer import aio
        from bootseer.blocks import open_cache
        from bootseer.blocks.local import open_local
        from bootseer.storage import HasPeers
        from bootseer.tree.opening import open_tree
        from bootseer.tree.reading import StoreBlocks
        from bootseer.trust import Trust

        cache = open_cache(self._environ, log=self._log)

        async def opened(store: Store) -> OpenedTree:
            return await open_tree(store, self.url, Trust(), digest=self.digest, cached=cache.read_index)

        with self._open_store() as store:
            found = aio.run_sync(opened(store))
            if isinstance(store, HasPeers):
                aio.run_sync(store.meet(found.index.stored_bytes))
            stored = StoreBlocks(store, found.index)
            with open_local(cache, self.digest, found.index, stored, self._log) as blocks:
                yield OpenEnvTree(found.index, blocks)

    @contextmanager
    def open_blocks(self, index: Index) -> Iterator[BlockSource]:
        """For one thread of another process, which got what it knows of the index from one that has opened it.

        Args: index: only its packs and blocks count. Raises: StorageError, ConfigError.
        """
        from bootseer.blocks.cache import open_cache
        from bootseer.blocks.local import open_local

        cache = open_cache(self._environ, log=self._log)
        with _LaterBlocks(lambda: self._open_stored(index)) as later:
            stored: BlockSource = later
            if folder := self._near_folder():
                from bootseer.tree.materialise_reading import FolderBlocks

                stored = FolderBlocks(folder, index, later)
            with open_local(cache, self.digest, index, stored, self._log) as blocks:
                yield blocks

    @contextmanager
    def _open_stored(self, index: Index) -> Iterator[BlockSource]:
        from bootseer.tree.reading import StoreBlocks

        with self._open_store() as store:
            yield StoreBlocks(store, index)

    @contextmanager
    def _open_store(self) -> Iterator[Store]:
        from bootseer import aio
        from bootseer.storage import open_store

        async def opened() -> Store:
            if not self.has_peers:
                return open_store(self.store_url, options=self.options)
            from bootseer.peers import open_peer_store

            return open_peer_store(self.store_url, self._peers, options=self.options, log=self._log)

        store = aio.run_sync(opened())
        try:
            yield store
        finally:
            aio.run_sync(store.aclose())

    @property
    def store_url(self) -> str:
        """As it is opened, by mounts too."""
        from bootseer.tree.head import store_url_of

        return store_url_of(self.url)

    def _near_folder(self) -> str:
        return near_folder_of(self.store_url)


class _LaterBlocks:
    """A `BlockSource` that is opened when something is asked of it. For one thread."""

    def __init__(self, open_source: Callable[[], AbstractContextManager[BlockSource]]) -> None:
        self._open_source = open_source
        self._stack = ExitStack()
        self._source: BlockSource | None = None

    def __enter__(self) -> _LaterBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes | memoryview]]:
        if self._source is None:
            self._source = self._stack.enter_context(self._open_source())
        return self._source.read_blocks(numbers)
