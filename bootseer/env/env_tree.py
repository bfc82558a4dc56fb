"""The tree of a snapshot in its store, opened when it is needed: what is there already needs nothing of it.

In: the tree's URL and digest, which is all that is believed. Out: its index and a source of its blocks, those that
the node has already from its cache.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol

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
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        """
        Args: url: with or without its digest. options: of the store. environ: says where the cache is. log: lines
            for what is done without.
        """
        self.url, self.digest = url, digest
        self.options, self._log = dict(options or {}), log
        self._environ = os.environ if environ is None else environ

    @property
    def is_in_files(self) -> bool:
        """Whether its store is a folder, here or mounted here."""
        return bool(self._path())

    @contextmanager
    def open(self) -> Iterator[OpenEnvTree]:
        from bootseer import aio
        from bootseer.blocks import open_cache
        from bootseer.blocks.local import open_local
        from bootseer.tree.opening import open_tree
        from bootseer.tree.reading import StoreBlocks
        from bootseer.trust import Trust

        cache = open_cache(self._environ, log=self._log)

        async def opened(store: Store) -> OpenedTree:
            return await open_tree(store, self.url, Trust(), digest=self.digest, cached=cache.read_index)

        with self._open_store() as store:
            found = aio.run_sync(opened(store))
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
            if folder := self._folder():
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
        from bootseer.tree.head import split_pin

        async def opened() -> Store:
            return open_store(split_pin(self.url)[0], options=self.options)

        store = aio.run_sync(opened())
        try:
            yield store
        finally:
            aio.run_sync(store.aclose())

    def _folder(self) -> str:
        """Of the store, if it lies on a disk of this machine: calls to others may hang."""
        from bootseer.storage.page_cache import is_remote

        folder = self._path()
        return folder if folder and not is_remote(folder) else ""

    def _path(self) -> str:
        """Of the store, "" for one that is no folder."""
        from bootseer.tree.head import split_pin

        return path_of(split_pin(self.url)[0])


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


def path_of(url: str) -> str:
    """The folder of a store at this URL, "" for one that is none."""
    from bootseer.storage.open import local_path
    from bootseer.storage.paths import is_chained, scheme_of

    is_file = scheme_of(url) in ("", "file", "local") and not is_chained(url)
    return local_path(url) if is_file else ""
