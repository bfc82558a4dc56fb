"""What the daemon of a tree stands on: store, cache, index, metadata, fetcher. Opened in order, closed in reverse.

A tree that was mounted here before needs nothing of its store: index and metadata are in the cache, and the index
was checked when they came there. Then its entries are not even decoded; for fetching, its blocks are enough.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, NamedTuple

from bootseer import aio
from bootseer.blocks import BlockFetcher, Cache, TreeCache
from bootseer.blocks import open_cache as open_named_cache
from bootseer.blocks.cache import TREES
from bootseer.blocks.donors import Donors
from bootseer.cache_folder import Limit
from bootseer.mounts import tree_maker, tree_metadata
from bootseer.mounts.flat_server import Device
from bootseer.mounts.metadata_memory import MetadataMemory
from bootseer.mounts.tree_maker import Maker
from bootseer.mounts.tree_settings import Settings
from bootseer.mounts.tree_traces import Traces
from bootseer.mounts.tree_vetting import Vetted
from bootseer.storage import HasPeers, Store, open_store
from bootseer.storage.near import near_folder_of
from bootseer.tree import erofs
from bootseer.tree import index as indexes
from bootseer.tree.index import Index, index_path
from bootseer.tree.opening import read_index_bytes
from bootseer.trust import Trust, TrustedKey
from bootseer.trust.keys import parse_public
from bootseer.trust.reading import place_of

if TYPE_CHECKING:
    from bootseer.peers.membership import PeersFile


class Parts:
    """Made by `open_parts`, with which it ends."""

    def __init__(
        self,
        cache: Cache,
        tree_cache: TreeCache,
        index: Index,
        fetcher: BlockFetcher,
        traces: Traces,
        maker: Maker,
        stores: Stores,
        log: Callable[[str], None],
    ) -> None:
        self._peers, self._store = stores.peers, stores.read
        self.cache, self.tree_cache, self.fetcher, self.traces = cache, tree_cache, fetcher, traces
        self.index = index  # without entries
        self._maker, self._log = maker, log
        self._metadata: bytes | bytearray | memoryview = b""
        self._is_new = False  # the metadata has to be made
        self._is_checked = False
        self._full: Index | None = None  # until then, if it was decoded here
        self._index_bytes = b""  # as they came from the store
        self._vetted: Vetted | None = None  # who looks at the index instead
        self._growing: MetadataMemory | None = None
        self._is_made = asyncio.Event()  # all of the metadata is there

    @property
    def folder(self) -> str:
        """Of the tree in the cache; there may be none."""
        return _folder(self.cache, self.tree_cache.tree)

    @property
    def peers_path(self) -> str:
        """Of the file that says who is asked before the store; "" for nobody."""
        return "" if self._peers is None else self._peers.path

    def follow_peers(self, path: str) -> None:
        """Those of another job from now on, where any are asked."""
        if self._peers is not None:
            self._peers.follow(path)

    async def meet_peers(self) -> None:
        """Before much is read of the tree."""
        if isinstance(self._store, HasPeers):
            await self._store.meet(self.index.stored_bytes)

    def block_statistics(self) -> dict[str, float]:
        """As `block_statistics` below, of this process."""
        return block_statistics(self.fetcher, self._store)

    async def check(self) -> None:
        """Waits until the whole index has stood its check. Before this nothing may be fetched or shown.

        By somebody else, or here when it was opened; some of it by the maker. What nobody says is found out here.
        Raises: IntegrityError.
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
        """For EROFS; before `check` it may not be right. Made now, if it was not in the cache: as much as a mount
        reads; `finish` has to follow.
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
        """The rest of the metadata, in the background. What was read of it meanwhile is answered then."""
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
        """In a thread: without another process, or when that has failed."""
        tree = self.tree_cache.tree
        full = self._full or await aio.run_io(indexes.read_unchecked, self._index_bytes, tree, "its index")
        return await aio.run_io(erofs.metadata, full, tree)

    @property
    def index_bytes(self) -> bytes | None:
        """The index object as it came from the store; None: it is in the cache."""
        return self._index_bytes or None

    async def keep(self) -> None:
        """What the store does not have to be asked for at the next start."""
        await self._is_made.wait()
        self._full = None  # to take it apart takes its time
        data = self._index_bytes
        if data and not self.tree_cache.full_reason:
            digest = self.tree_cache.tree
            await aio.run_io(self.cache.write_index, digest, data)
            self._index_bytes = b""
            await aio.run_io(tree_metadata.keep, _folder(self.cache, digest), digest, self._metadata, self._log)


class Stores(NamedTuple):
    """Of a tree."""

    itself: Store  # may be written
    read: Store  # the job's peers are asked before it
    peers: PeersFile | None  # None: nobody is asked


async def open_stores(stack: AsyncExitStack, settings: Settings, log: Callable[[str], None]) -> Stores:
    """`stack` closes them. Raises: ConfigError."""
    store = open_store(settings.url, timeout_s=settings.store_timeout_s, options=settings.options)
    # A store with replicas is read otherwise when others are asked as well: only for a job that has some.
    is_alone = not settings.peers and store.features.has_replicas
    near_folder = "" if is_alone else await aio.run_io(near_folder_of, settings.url)
    if is_alone or near_folder:
        stack.push_async_callback(store.aclose)
        return Stores(store, store, None)
    from bootseer.peers import PeerStore
    from bootseer.peers.membership import PeersFile

    peers = PeersFile(settings.peers, log=log)
    read = PeerStore(store, settings.url, peers)
    stack.push_async_callback(read.aclose)
    return Stores(store, read, peers)


async def open_parts(
    stack: AsyncExitStack,
    settings: Settings,
    digest: str,
    log: Callable[[str], None],
    vetted: Vetted | None = None,
) -> Parts:
    """All of it, but for the metadata, if that has to be made. `stack` closes it.

    Args: vetted: the index, of whoever looks at it; then `check` has to follow.
    Raises: ConfigError, NotFound, StorageError, IntegrityError.
    """
    if vetted is not None:
        stack.callback(vetted.close)
    stores = await open_stores(stack, settings, log)
    store = stores.read
    cache = await aio.run_io(open_cache, settings, log)
    maker = tree_maker.take()
    stack.callback(maker.close)
    folder = _folder(cache, digest)
    metadata = await aio.run_io(tree_metadata.read, folder, digest)
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
        index = await aio.run_io(_open_vetted, maker, index_bytes, digest)
    else:
        full, index_bytes = await _open_index(store, cache, digest, maker)
        index = tree_metadata.slim(full)
    fetcher = await open_fetcher(stack, settings, store, cache, index, digest, log)
    trust = Trust([TrustedKey(parse_public(line, "a key"), "a key") for line in settings.keys])
    traces = Traces(folder, digest, index.block_count, stores.itself, trust, log)
    parts = Parts(cache, fetcher.cache, index, fetcher, traces, maker, stores, log)
    parts._metadata, parts._full, parts._index_bytes = metadata or b"", full, index_bytes
    parts._is_new, parts._vetted = is_new, vetted if is_new else None
    return parts


async def open_fetcher(
    stack: AsyncExitStack,
    settings: Settings,
    store: Store,
    cache: Cache,
    index: Index,
    digest: str,
    log: Callable[[str], None],
) -> BlockFetcher:
    """Of a tree whose index is known, with the tree's cache. `stack` closes both. Raises: StorageError."""
    tree_cache = await aio.run_io(cache.open_tree, digest, index.block_count)
    stack.push_async_callback(aio.run_io, tree_cache.close)
    donors = Donors(cache, digest, index, log=log)
    fetcher = BlockFetcher(index, tree_cache, [store], donors=donors, deadline_s=settings.deadline_s)
    stack.push_async_callback(fetcher.aclose)
    return fetcher


def block_statistics(fetcher: BlockFetcher, store: Store) -> dict[str, float]:
    """Those of a fetcher, and how much of it came from peers and from the store, if both were asked."""
    counts = store.statistics()
    came: dict[str, float] = {name: counts[name] for name in ("peer_bytes", "store_bytes") if name in counts}
    return {**fetcher.statistics(), **came}


def _read_known(cache: Cache, digest: str) -> Index | None:
    data = cache.read_index(digest)
    return None if data is None else tree_metadata.decode_slim(data, digest)


def _open_vetted(maker: Maker, data: bytes, digest: str) -> Index:
    """Of an index object what fetching takes; that is all that is looked at here."""
    maker.begin(data, digest)
    index = maker.slim() or tree_metadata.decode_slim(data, digest)
    indexes.check_blocks(index, f"the index of {digest}")
    return index


async def _open_index(store: Store, cache: Cache, digest: str, maker: Maker) -> tuple[Index, bytes]:
    """The index, whose shape is right, and as it is stored; `maker` has it then. The digest is believed."""
    data = await aio.run_io(cache.read_index, digest) or await read_index_bytes(store, digest)
    await aio.run_io(maker.begin, data, digest)
    where = place_of(store, index_path(digest))
    full = await aio.run_io(indexes.read_unchecked, data, digest, where)
    await aio.run_io(indexes.check_shape, full, where)
    return full, data


def open_cache(settings: Settings, log: Callable[[str], None]) -> Cache:
    """Blocks. Raises: ConfigError, StorageError."""
    if not settings.cache_folder:
        return open_named_cache(os.environ, log=log)
    limit = Limit(settings.cache_bytes, settings.cache_share)
    return Cache(settings.cache_folder, limit=limit, log=log)


def _folder(cache: Cache, digest: str) -> str:
    return os.path.join(cache.folder, TREES, digest)
