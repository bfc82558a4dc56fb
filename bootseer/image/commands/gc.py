"""`bootseer image gc`: removes cached data of a node beyond its limit, and unused data of trees in a store."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.blocks.cache import Cache, CachedTree
from bootseer.blocks.tree_files import LOCK, USE_BYTE
from bootseer.counted import counted
from bootseer.errors import ConfigError, IntegrityError, SourceChanged, StorageError
from bootseer.image.commands.common import (
    is_registry,
    node_cache,
    node_directory,
    opened_store,
    shown,
    tree_url,
)
from bootseer.linux.locks import try_lock
from bootseer.logs import get_logger
from bootseer.mounts.unpacked.places import is_used, list_unpacked, remove_gone, remove_unpacked
from bootseer.storage import Entry, Store
from bootseer.storage.small_files import list_if_there
from bootseer.tree.head import HEAD_NAME, is_digest, split_pin
from bootseer.tree.index import decode, index_path
from bootseer.tree.opening import read_head, read_index_bytes
from bootseer.trust import Trust

_log = get_logger(__name__)

DELETES_AT_ONCE = 8
_DAY_S = 86_400.0


# ---- of a node ---------------------------------------------------------------------------------------------


class RemovedTree(NamedTuple):
    digest: str
    kind: str  # blocks or unpacked
    size: int  # bytes on disk
    unused_s: float


class NodeGcResult(NamedTuple):
    """The result for a node's cache."""

    folder: str
    removed: list[RemovedTree]
    freed_bytes: int
    left_bytes: int  # of blocks
    limit_bytes: int  # of blocks


def collect_node(*, max_bytes: int | None, unused_s: float, is_dry: bool) -> NodeGcResult:
    """Remove blocks of the least recently used trees beyond the limit. Remove unpacked trees beyond their limit,
    which is as large, and those that were not used for `unused_s`. Trees in use stay.

    Args: max_bytes: instead of the cache's own limit.
    Raises: ConfigError for a cache that cannot be used; StorageError.
    """
    cache = node_cache()
    now_s = time.time()
    before = cache.trees()
    limit = cache.limit_bytes() if max_bytes is None else max_bytes
    if is_dry:
        going = list(_beyond(before, limit, [node_directory(cache, each.digest) for each in before]))
        left = sum(each.size_bytes for each in before) - sum(each.size_bytes for each in going)
    else:
        done = cache.collect(max_bytes)
        there = {each.digest for each in cache.trees()}
        going = [each for each in before if each.digest not in there]
        left, limit = done.left_bytes, done.limit_bytes
    removed = [RemovedTree(each.digest, "blocks", each.size_bytes, now_s - each.used_s) for each in going]
    removed += _collect_unpacked(cache, max_bytes, unused_s, now_s, is_dry)
    return NodeGcResult(cache.folder, removed, sum(each.size for each in removed), left, limit)


def _collect_unpacked(
    cache: Cache, max_bytes: int | None, unused_s: float, now_s: float, is_dry: bool
) -> Iterator[RemovedTree]:
    if not is_dry:
        remove_gone(cache)
    there = list_unpacked(cache)
    left = sum(each.size for each in there)
    limit = cache.limit_of(left) if max_bytes is None else max_bytes
    for each in reversed(there):
        age_s = now_s - each.used_s
        if left <= limit and age_s < unused_s:
            continue
        try:
            goes = not is_used(cache, each.digest) if is_dry else remove_unpacked(cache, each.digest)
        except StorageError as error:
            _log.warning("cannot remove an unused unpacked tree: %s", error)
            continue
        if goes:
            left -= each.size
            yield RemovedTree(each.digest, "unpacked", each.size, age_s)


def _beyond(trees: Sequence[CachedTree], limit: int, directories: Sequence[str]) -> Iterator[CachedTree]:
    """Yield the trees that `Cache.collect` would remove."""
    left = sum(each.size_bytes for each in trees)
    for tree, directory in reversed(list(zip(trees, directories, strict=True))):
        if (left > limit or not tree.size_bytes) and _is_free(os.path.join(directory, LOCK)):
            left -= tree.size_bytes
            yield tree


def _is_free(path: str) -> bool:
    """Return whether no process uses the tree now; False if the file system has no locks."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return try_lock(fd, USE_BYTE)
        finally:
            os.close(fd)
    except OSError:
        return False


# ---- of a store --------------------------------------------------------------------------------------------


class StoreGcResult(NamedTuple):
    """The result for a tree's directory."""

    digest: str  # of the present tree
    kept_digests: list[str]
    packs: int  # removed, or to be removed
    indexes: int
    traces: int  # directories of them
    freed_bytes: int
    recent: int  # packs and trees that stay for now: a build or a job may still need them
    paths: list[str]


class _Candidate(NamedTuple):
    path: str
    entry: Entry


def collect_store(url: str, *, name: str, keep: Sequence[str], older_s: float, is_dry: bool) -> StoreGcResult:
    """Delete packs, indexes and traces of a tree's directory that belong neither to the tree nor to `keep`.

    Args:
        keep: further tree digests that readers may still request.
        older_s: data that was in use more recently stays: jobs may still read an earlier version, and a running
            build has not published its needs yet.
    Raises: Untrusted if no trusted key signed the tree; SourceChanged if it is replaced meanwhile; ConfigError.
    """
    if is_registry(url):
        raise ConfigError(f"{shown(url)}: registries collect garbage themselves; delete the tag there")
    url = tree_url(url)
    if split_pin(url)[1]:
        raise ConfigError(f"{shown(url)}: give the directory without a digest; keep trees with --keep DIGEST")
    for digest in keep:
        if not is_digest(digest):
            raise ConfigError(f"--keep {digest[:80]!r}: a tree digest is 64 hex digits")
    trust = Trust.load()
    with opened_store(url) as store:
        return aio.run_sync(_collect_store(store, url, trust, name, keep, older_s, is_dry))


async def _collect_store(
    store: Store, url: str, trust: Trust, name: str, keep: Sequence[str], older_s: float, is_dry: bool
) -> StoreGcResult:
    head = (await read_head(store, url, trust, name=name)).head
    digests = list(dict.fromkeys((head.digest, *keep)))
    there = await _list(store)
    now_s = time.time()
    wanted = set[str]()
    for digest in digests:
        wanted |= await _paths_of(store, url, digest)
    head_mtime_s = next((entry.mtime_s for entry in await store.list("") if entry.name == HEAD_NAME), 0.0)
    indexes = [found.entry for found in there if found.path.startswith("index/")]
    recent = recent_indexes(indexes, now_s, older_s, head_mtime_s=head_mtime_s)
    for digest in recent.difference(digests):
        try:
            wanted |= await _paths_of(store, url, digest)
        except IntegrityError as error:
            _log.warning("an index of an earlier tree cannot be used: %s", error)
    # Directories of traces do not have a time of their own in all stores: they go with their index.
    young = {
        found.path
        for found in there
        if found.path.startswith("packs/")
        and found.path not in wanted
        and _is_young(found.entry.mtime_s, now_s, older_s)
    }
    going = [found for found in there if found.path not in wanted and found.path not in young]
    if going and not is_dry:
        now = (await read_head(store, url, trust, name=name)).head
        if now.digest != head.digest:
            raise SourceChanged(
                f"{shown(url)}: was replaced meanwhile: nothing was deleted; run the command again"
            )
        # Indexes first: a tree without one cannot be opened, so no reader starts on it while its packs are
        # deleted.
        for part in (True, False):
            chosen = [found.path for found in going if found.path.startswith("index/") is part]
            await aio.map_bounded(store.delete, chosen, width=DELETES_AT_ONCE)
    left = len(young) + len(recent.difference(digests))
    if left:
        _log.info(
            "%s packs and trees are kept, because they were in use less than %s ago",
            left,
            counted(older_s / _DAY_S, "day"),
        )
    kinds = [found.path.partition("/")[0] for found in going]
    return StoreGcResult(
        head.digest,
        digests,
        kinds.count("packs"),
        kinds.count("index"),
        kinds.count("traces"),
        sum(found.entry.size for found in going),
        left,
        [found.path for found in going],
    )


async def _paths_of(store: Store, url: str, digest: str) -> set[str]:
    """Return the paths that the tree of a digest needs."""
    data = await read_index_bytes(store, digest)
    index = await aio.run_io(decode, data, digest, f"{shown(url)}: {index_path(digest)}")
    packs = {index.pack_path(pack) for pack in range(len(index.packs))}
    return packs | {index_path(digest), f"traces/{digest}"}


def recent_indexes(
    indexes: Sequence[Entry], now_s: float, older_s: float, *, head_mtime_s: float = 0.0
) -> set[str]:
    """PURE: return the digests of trees that were the newest less than `older_s` ago, until the next one came.

    `head_mtime_s`: of tree.json, 0 if unknown: it may have been set back to an older index.
    """
    ordered = sorted(indexes, key=lambda entry: (entry.mtime_s, entry.name))
    ends_s = [entry.mtime_s for entry in ordered[1:]]
    if ordered:
        last_s = ordered[-1].mtime_s
        ends_s.append(max(last_s, head_mtime_s) if last_s else 0.0)
    return {entry.name for entry, end_s in zip(ordered, ends_s, strict=True) if _is_young(end_s, now_s, older_s)}


def _is_young(mtime_s: float, now_s: float, older_s: float) -> bool:
    """Return whether it is younger than `older_s`; True if its age is unknown."""
    return older_s > 0 and (not mtime_s or now_s - mtime_s < older_s)


async def _list(store: Store) -> list[_Candidate]:
    """Return the candidates for deletion: files and directories that are named by digests."""
    found = []
    for directory in ("index", "packs", "traces"):
        for entry in await list_if_there(store, directory):
            if is_digest(entry.name) and entry.is_folder == (directory == "traces"):
                found.append(_Candidate(f"{directory}/{entry.name}", entry))
    return found
