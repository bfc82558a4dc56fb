"""Parts of a tree's daemon: store, cache, index, metadata, fetcher. Opened in order, closed in reverse.

A tree that was mounted here before needs nothing from its store: index and metadata are in the cache, and the
index was validated before it was cached. Then its entries are not even decoded: its blocks are enough for
fetching.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from bootseer import aio
from bootseer.blocks.cache import TREES, Cache
from bootseer.blocks.cache import open_cache as open_named_cache
from bootseer.blocks.dedup_sources import DedupSources
from bootseer.blocks.fetch import BlockFetcher
from bootseer.blocks.tree_cache import TreeCache
from bootseer.cache_folder import Limit
from bootseer.mounts.device.metadata_memory import MetadataMemory
from bootseer.mounts.device.server import Device
from bootseer.mounts.tree_daemon import metadata as tree_metadata
from bootseer.mounts.tree_daemon import metadata_maker as tree_maker
from bootseer.mounts.tree_daemon.metadata_maker import Maker
from bootseer.mounts.tree_daemon.settings import Settings
from bootseer.mounts.tree_daemon.traces import Traces
from bootseer.mounts.tree_daemon.validation import SuppliedIndex
from bootseer.storage import HasPeers, Store, open_store
from bootseer.storage.local_stores import local_disk_directory_of
from bootseer.storage.small_files import url_of
from bootseer.tree import erofs
from bootseer.tree import index as indexes
from bootseer.tree.index import Index, index_path
from bootseer.tree.opening import read_index_bytes
from bootseer.trust import Trust, TrustedKey
from bootseer.trust.keys import parse_public

if TYPE_CHECKING:
    from bootseer.peers.membership import PeersFile


class DaemonParts:
    """The parts of one daemon. Made by `open_parts`, whose `stack` closes them."""

    def __init__(
        self,
        cache: Cache,
        tree_cache: TreeCache,
        index: Index,
        fetcher: BlockFetcher,
        traces: Traces,
        maker: Maker,
        stores: Stores,
    ) -> None:
        self._peers, self._store = stores.peers, stores.read
        self.cache, self.tree_cache, self.fetcher, self.traces = cache, tree_cache, fetcher, traces
        self.index = index  # without entries
        self._maker = maker
        self._metadata: bytes | bytearray | memoryview = b""
        self._is_new = False  # the metadata has to be made
        self._is_checked = False
        self._full: Index | None = None  # until it is made, if it was decoded here
        self._index_bytes = b""  # as read from the store
        self._vetted: SuppliedIndex | None = None  # the starter validates the index instead
        self._growing: MetadataMemory | None = None
        self._is_made = asyncio.Event()  # all of the metadata is there
        self._has_place = False  # for a status folder, in the metadata

    @property
    def folder(self) -> str:
        """Return the tree's directory in the cache; there may be none."""
        return _directory(self.cache, self.tree_cache.tree)

    @property
    def peers_path(self) -> str:
        """Return the path of the file of peers, which are read before the store; "" for none."""
        return "" if self._peers is None else self._peers.path

    def follow_peers(self, path: str) -> None:
        """Use the peers of another job from now on, if peers are used."""
        if self._peers is not None:
            self._peers.follow(path)

    async def connect_peers(self) -> None:
        """Connect to the peers, before much is read of the tree."""
        if isinstance(self._store, HasPeers):
            await self._store.meet(self.index.stored_bytes)

    def block_statistics(self) -> dict[str, float]:
        """Return `block_statistics` of this process."""
        return block_statistics(self.fetcher, self._store)

    async def check(self) -> None:
        """Wait until the whole index is validated. Before this nothing may be fetched or mounted.

        The starter validates it, or this process when it was opened, and the maker a part of it. Parts that none
        has validated are validated here. Raises: IntegrityError.
        """
        if not self._is_new or self._is_checked:
            return
        self._is_checked = True
        is_right = await aio.run_io(self._maker.is_checked)
        if self._vetted is not None:
            is_right = await aio.run_io(self._vetted.is_right) and is_right
        tree = self.tree_cache.tree
        where = f"the index of {tree}"
        if not is_right and self._full is not None:
            await aio.run_io(indexes.check, self._full, where)
        elif not is_right:
            self._full = await aio.run_io(indexes.decode, self._index_bytes, tree, where)

    async def metadata(self) -> Device:
        """Return the metadata for EROFS; before `check` it may be wrong. If it was not cached, it is made now: as
        much as a mount reads; `finish` has to follow.
        """
        if self._is_new:
            self._growing = await aio.run_io(self._maker.first)
            if self._growing is not None:
                return self._growing
            await self.check()
            self._metadata = await self._make()
        self._is_made.set()
        return MetadataMemory(self._metadata)

    async def finish(self) -> None:
        """Make the rest of the metadata, in the background, and answer the reads that wait for it."""
        growing = self._growing
        if growing is None:
            return
        try:
            size = await aio.run_io(self._maker.finish)
            if size:
                growing.complete(size)
            else:
                made = await self._make()
                growing.complete(len(made), made)
        finally:
            growing.fail()
        self._metadata = growing.data
        self._is_made.set()

    async def _make(self) -> bytearray:
        """Make the metadata in a thread: without the maker, or when that has failed."""
        tree = self.tree_cache.tree
        full = self._full or await aio.run_io(indexes.read_unchecked, self._index_bytes, tree, "its index")
        if self._has_place:
            from bootseer.tree.status_folder import with_place

            full = await aio.run_io(with_place, full)
        return await aio.run_io(erofs.metadata, full, tree)

    @property
    def index_bytes(self) -> bytes | None:
        """Return the index object as read from the store; None: it is in the cache."""
        return self._index_bytes or None

    async def keep(self) -> None:
        """Cache index and metadata, so that the next start need not read them from the store."""
        await self._is_made.wait()
        self._full = None  # freeing it takes a while
        data = self._index_bytes
        if data and not self.tree_cache.full_reason:
            digest = self.tree_cache.tree
            await aio.run_io(self.cache.write_index, digest, data)
            self._index_bytes = b""
            directory, name = _directory(self.cache, digest), _metadata_name(self._has_place)
            await aio.run_io(tree_metadata.store, directory, digest, self._metadata, name)


class Stores(NamedTuple):
    itself: Store  # for writes
    read: Store  # the job's peers are read before it
    peers: PeersFile | None  # None: no peers


async def open_stores(stack: AsyncExitStack, settings: Settings) -> Stores:
    """Open the stores of a tree; `stack` closes them. Raises: ConfigError."""
    store = open_store(settings.url, timeout_s=settings.store_timeout_s, options=settings.options)
    # A store with replicas is read differently when peers are used: only for a job that has some.
    is_alone = not settings.peers and store.features.has_replicas
    near_directory = "" if is_alone else await aio.run_io(local_disk_directory_of, settings.url)
    if is_alone or near_directory:
        stack.push_async_callback(store.aclose)
        return Stores(store, store, None)
    from bootseer.peers import PeerStore
    from bootseer.peers.membership import PeersFile

    peers = PeersFile(settings.peers)
    read = PeerStore(store, settings.url, peers)
    stack.push_async_callback(read.aclose)
    return Stores(store, read, peers)


async def open_parts(
    stack: AsyncExitStack,
    settings: Settings,
    digest: str,
    vetted: SuppliedIndex | None = None,
) -> DaemonParts:
    """Open all parts except metadata that must be made. `stack` closes them.

    Args: vetted: the index, if the starter validates it; then `check` has to follow.
    Raises: ConfigError, NotFound, StorageError, IntegrityError.
    """
    if vetted is not None:
        stack.callback(vetted.close)
    stores = await open_stores(stack, settings)
    store = stores.read
    cache = await aio.run_io(open_cache, settings)
    maker = tree_maker.take()
    stack.callback(maker.close)
    directory = _directory(cache, digest)
    has_place = settings.status_folder
    metadata = await aio.run_io(tree_metadata.read, directory, digest, _metadata_name(has_place))
    index: Index | None = None
    full: Index | None = None
    index_bytes = b""
    if metadata is not None:
        index = await aio.run_io(_read_known, cache, digest)
    is_new = index is None
    if index is not None:
        maker.close()
    elif vetted is not None:
        index_bytes = await aio.run_io(vetted.read, digest)
        index = await aio.run_io(_open_vetted, maker, index_bytes, digest, has_place)
    else:
        full, index_bytes = await _open_index(store, cache, digest, maker, has_place)
        index = tree_metadata.slim(full)
    fetcher = await open_fetcher(stack, settings, store, cache, index, digest)
    trust = Trust([TrustedKey(parse_public(line, "a key"), "a key") for line in settings.keys])
    traces = Traces(directory, digest, index.block_count, stores.itself, trust)
    parts = DaemonParts(cache, fetcher.cache, index, fetcher, traces, maker, stores)
    parts._metadata, parts._full, parts._index_bytes = metadata or b"", full, index_bytes
    parts._is_new, parts._vetted = is_new, vetted if is_new else None
    parts._has_place = has_place
    return parts


async def open_fetcher(
    stack: AsyncExitStack,
    settings: Settings,
    store: Store,
    cache: Cache,
    index: Index,
    digest: str,
) -> BlockFetcher:
    """Open the fetcher and the cache of a tree with a known index. `stack` closes both. Raises: StorageError."""
    tree_cache = await aio.run_io(cache.open_tree, digest, index.block_count)
    stack.push_async_callback(aio.run_io, tree_cache.close)
    dedup_sources = DedupSources(cache, digest, index)
    fetcher = BlockFetcher(index, tree_cache, [store], dedup_sources=dedup_sources, deadline_s=settings.deadline_s)
    stack.push_async_callback(fetcher.aclose)
    return fetcher


def block_statistics(fetcher: BlockFetcher, store: Store) -> dict[str, float]:
    """Return a fetcher's statistics, with the bytes from peers and from the store if both were read."""
    counts = store.statistics()
    came: dict[str, float] = {name: counts[name] for name in ("peer_bytes", "store_bytes") if name in counts}
    return {**fetcher.statistics(), **came}


def _read_known(cache: Cache, digest: str) -> Index | None:
    data = cache.read_index(digest)
    return None if data is None else tree_metadata.decode_slim(data, digest)


def _open_vetted(maker: Maker, data: bytes, digest: str, adds_place: bool) -> Index:
    """Return the part of an index object for fetching; only that is validated here."""
    maker.begin(data, digest, adds_place=adds_place)
    index = maker.slim() or tree_metadata.decode_slim(data, digest)
    indexes.check_blocks(index, f"the index of {digest}")
    return index


async def _open_index(
    store: Store, cache: Cache, digest: str, maker: Maker, adds_place: bool
) -> tuple[Index, bytes]:
    """Read the index, with a valid shape, and its stored form; send it to `maker`. The digest is trusted."""
    data = await aio.run_io(cache.read_index, digest) or await read_index_bytes(store, digest)
    await aio.run_io(partial(maker.begin, data, digest, adds_place=adds_place))
    where = url_of(store, index_path(digest))
    full = await aio.run_io(indexes.read_unchecked, data, digest, where)
    await aio.run_io(indexes.check_shape, full, where)
    return full, data


def open_cache(settings: Settings) -> Cache:
    """Open the cache. Blocks. Raises: ConfigError, StorageError."""
    if not settings.cache_folder:
        return open_named_cache(os.environ)
    limit = Limit(settings.cache_bytes, settings.cache_share)
    return Cache(settings.cache_folder, limit=limit)


def _metadata_name(has_place: bool) -> str:
    return tree_metadata.WITH_PLACE if has_place else tree_metadata.NAME


def _directory(cache: Cache, digest: str) -> str:
    return os.path.join(cache.folder, TREES, digest)
