"""The tree of a snapshot in its store, opened on demand: an environment in its place does not need it.

In: the tree's URL and digest; only the digest is trusted. Out: its index and a source of its blocks, which uses
the block cache of the node first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

from bootseer.storage.local_stores import directory_of, local_disk_directory_of

if TYPE_CHECKING:
    from bootseer.storage import Store
    from bootseer.tree.index import Index
    from bootseer.tree.opening import OpenedTree
    from bootseer.tree.reading import BlockSource


class OpenEnvTree(NamedTuple):
    """The index and blocks for unpacking."""

    tree: Index
    blocks: BlockSource


class EnvTree(Protocol):
    """A tree that can be opened."""

    @property
    def url(self) -> str:
        """The URL of the tree's directory, for mounts; "" for a tree that is in no store."""
        ...

    def open(self) -> AbstractContextManager[OpenEnvTree]:
        """Open the tree. Raises: NotFound, StorageError, IntegrityError, ConfigError."""
        ...


class StoredTree:
    """A tree in a store. Implements EnvTree."""

    def __init__(
        self,
        url: str,
        digest: str,
        *,
        environ: Mapping[str, str] | None = None,
        peers: str = "",
    ) -> None:
        """
        Args: url: with or without its digest. environ: locates the cache. peers: path of the file that lists the
            job's peers (bootseer.peers), "" for none.
        """
        self.url, self.digest = url, digest
        self._peers = peers
        self._environ = os.environ if environ is None else environ

    @property
    def is_in_files(self) -> bool:
        """Whether it is read from a directory, local or mounted, and not from other nodes."""
        return bool(directory_of(self.store_url)) and not self.has_peers

    @property
    def has_peers(self) -> bool:
        """Whether other nodes of the job are queried before its store."""
        return bool(self._peers) and not self._near_directory()

    @contextmanager
    def open(self) -> Iterator[OpenEnvTree]:
        from bootseer import aio
        from bootseer.blocks.cache import open_cache
        from bootseer.blocks.local import open_local
        from bootseer.storage import HasPeers
        from bootseer.tree.opening import open_tree
        from bootseer.tree.reading import StoreBlocks
        from bootseer.trust import Trust

        cache = open_cache(self._environ)

        async def opened(store: Store) -> OpenedTree:
            return await open_tree(store, self.url, Trust(), digest=self.digest, cached=cache.read_index)

        with self._open_store() as store:
            found = aio.run_sync(opened(store))
            if isinstance(store, HasPeers):
                aio.run_sync(store.meet(found.index.stored_bytes))
            stored = StoreBlocks(store, found.index)
            with open_local(cache, self.digest, found.index, stored) as blocks:
                yield OpenEnvTree(found.index, blocks)

    @contextmanager
    def open_blocks(self, index: Index) -> Iterator[BlockSource]:
        """Open the blocks in one thread of another process, which got the index from one that has opened it.

        Args: index: only its packs and blocks are used. Raises: StorageError, ConfigError.
        """
        from bootseer.blocks.cache import open_cache
        from bootseer.blocks.local import open_local

        cache = open_cache(self._environ)
        with _LazyBlocks(lambda: self._open_stored(index)) as later:
            stored: BlockSource = later
            if directory := self._near_directory():
                from bootseer.tree.unpack.reading import LocalBlocks

                stored = LocalBlocks(directory, index, later)
            with open_local(cache, self.digest, index, stored) as blocks:
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
                return open_store(self.store_url)
            from bootseer.peers import open_peer_store

            return open_peer_store(self.store_url, self._peers)

        store = aio.run_sync(opened())
        try:
            yield store
        finally:
            aio.run_sync(store.aclose())

    @property
    def store_url(self) -> str:
        """The URL of the store, as opened here and by mounts."""
        from bootseer.tree.head import store_url_of

        return store_url_of(self.url)

    def _near_directory(self) -> str:
        return local_disk_directory_of(self.store_url)


class _LazyBlocks:
    """A `BlockSource` that is opened at the first read. For one thread."""

    def __init__(self, open_source: Callable[[], AbstractContextManager[BlockSource]]) -> None:
        self._open_source = open_source
        self._stack = ExitStack()
        self._source: BlockSource | None = None

    def __enter__(self) -> _LazyBlocks:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes | memoryview]]:
        if self._source is None:
            self._source = self._stack.enter_context(self._open_source())
        return self._source.read_blocks(numbers)
