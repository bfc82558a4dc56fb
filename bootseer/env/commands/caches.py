"""`bootseer env caches`: lists and collects compile caches of a store, and those of this node.

A store has the newest generation of each key and, for an hour, earlier ones. A key that no start has read for
weeks belongs to an old software stack: it is removed as a whole. On a node, directories that no job has used are
removed.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import NamedTuple

from bootseer import aio
from bootseer.env.commands.common import opened
from bootseer.env.compile_cache.directories import KEY_LETTERS, remove_old
from bootseer.env.compile_cache.document import number_of
from bootseer.env.compile_cache.store import DIRECTORY, CacheStore, open_caches
from bootseer.env.restore.used_directories import LOCK, USE_BYTE
from bootseer.env.store.collecting import refuse_web_server
from bootseer.env.store.links import refuse_links
from bootseer.env.store.store import EnvStore
from bootseer.errors import BootseerError, Untrusted
from bootseer.linux.locks import try_lock
from bootseer.logs import get_logger
from bootseer.mounts.sandbox.shared import first_step
from bootseer.storage import Entry, Store
from bootseer.storage.small_files import list_if_there
from bootseer.tree.head import is_digest
from bootseer.trust import Trust

_log = get_logger(__name__)

AT_ONCE = 8


class StoredCaches(NamedTuple):
    """Compile caches of a key in a store."""

    key: str
    generation: int  # the newest trusted one; 0: none
    files: int
    size: int  # bytes of its files
    made_s: float  # since the epoch
    used_s: float  # last time that a start read one of its files; 0 if unknown
    because: str  # why it is trusted
    refused: list[str]  # files that are not used, with reasons
    newest_s: float  # time of the newest file of a generation; 0 if the store does not report it


class NodeCaches(NamedTuple):
    """A directory of compile caches on this node."""

    path: str
    files: int
    size: int  # bytes
    unused_s: float
    is_used: bool  # by a running job


class CachesCollected(NamedTuple):
    """The result of a collection, or of a dry run: paths on a node, keys in a store."""

    removed: list[str]
    freed_bytes: int
    generations: int  # files of replaced generations that were removed as well; in a store


# ---- of a store ----------------------------------------------------------------------------------------------


def list_store(url: str, environ: Mapping[str, str]) -> list[StoredCaches]:
    """List all keys, the last used first. Raises: StorageError."""
    trust = Trust.load(environ)
    with opened(url, trust=trust) as envs:
        found = aio.run_sync(_look(envs, trust))
    return sorted(found, key=lambda each: (-max(each.used_s, each.made_s), each.key))


def collect_store(url: str, environ: Mapping[str, str], *, unused_s: float, is_dry: bool) -> CachesCollected:
    """Remove keys that no start has used for `unused_s`, and files of old generations.

    Keys of unknown age stay. A dry run does not count replaced generations.
    Raises: ConfigError for a read-only store; StorageError.
    """
    trust = Trust.load(environ)
    with opened(url, trust=trust) as envs:
        refuse_web_server(envs.store)
        return aio.run_sync(_collect(envs, trust, unused_s, is_dry))


async def _look(envs: EnvStore, trust: Trust) -> list[StoredCaches]:
    await refuse_links(envs.store, DIRECTORY)
    entries = await list_if_there(envs.store, DIRECTORY)

    async def look(entry: Entry) -> StoredCaches | None:
        directory = f"{DIRECTORY}/{entry.name}"
        try:
            await refuse_links(envs.store, directory)
        except Untrusted as error:
            _log.info("%s", error)
            return None
        async with _of_key(envs, entry.name) as place:
            newest = await CacheStore(place, entry.name, trust).newest()
            names = await place.list("")
        newest_s = max((each.mtime_s for each in names if number_of(each.name)), default=0.0)
        generation = newest.generation
        if generation is None:
            return StoredCaches(entry.name, 0, 0, 0, 0.0, 0.0, "", newest.notes, newest_s)
        used_s = max((fact.used_s for fact in generation.files), default=0)
        return StoredCaches(
            entry.name,
            generation.number,
            len(generation.files),
            generation.size,
            float(generation.made_s),
            float(used_s),
            newest.because,
            newest.notes,
            newest_s,
        )

    keys = [entry for entry in entries if entry.is_folder and is_digest(entry.name)]
    return [each for each in await aio.map_bounded(look, keys, width=AT_ONCE) if each is not None]


@asynccontextmanager
async def _of_key(envs: EnvStore, key: str) -> AsyncIterator[Store]:
    """Open the store of a key by its own URL: a part of a store does not report the owners of files."""
    store = open_caches(envs.url, key)
    try:
        yield store
    finally:
        await store.aclose()


async def _collect(envs: EnvStore, trust: Trust, unused_s: float, is_dry: bool) -> CachesCollected:
    now_s = time.time()
    removed: list[str] = []
    freed_bytes = generations = 0
    for each in sorted(await _look(envs, trust)):
        if is_old(each, now_s, unused_s):
            removed.append(each.key)
            freed_bytes += each.size
            if not is_dry:
                # Highest first: a reader that cannot list finds no gap, and no generation without its tree.
                directory = f"{DIRECTORY}/{each.key}"
                names = [entry.name for entry in await envs.store.list(directory) if number_of(entry.name)]
                for name in sorted(names, reverse=True):
                    await envs.store.delete(f"{directory}/{name}")
                await envs.store.delete(directory)
        elif not is_dry:
            try:
                async with _of_key(envs, each.key) as place:
                    generations += await CacheStore(place, each.key, trust).collect_garbage()
            except BootseerError as error:
                _log.info("%s: replaced generations are kept: %s", each.key, error)
    return CachesCollected(removed, freed_bytes, generations)


def is_old(caches: StoredCaches, now_s: float, unused_s: float) -> bool:
    """PURE: return whether no known use is more recent than `unused_s`."""
    last_s = max(caches.used_s, caches.made_s, caches.newest_s)
    return last_s > 0 and now_s - last_s >= unused_s


# ---- of a node -----------------------------------------------------------------------------------------------


def list_node(environ: Mapping[str, str]) -> list[NodeCaches]:
    """List the directories of this user on this node, the last used first. Raises: ConfigError, StorageError."""
    above = first_step(environ)
    try:
        names = sorted(os.listdir(above))
    except FileNotFoundError:
        return []
    paths = [os.path.join(above, name) for name in names if re.fullmatch(f"[0-9a-f]{{{KEY_LETTERS}}}", name)]
    found = [each for each in map(_look_at, paths) if each is not None]
    return sorted(found, key=lambda each: (each.unused_s, each.path))


def collect_node(environ: Mapping[str, str], *, unused_s: float, is_dry: bool) -> CachesCollected:
    """Remove directories that no job has used for `unused_s`. Raises: ConfigError, StorageError."""
    before = list_node(environ)
    if is_dry:
        gone = [each.path for each in before if each.unused_s >= unused_s and not each.is_used]
    else:
        gone = remove_old(environ, unused_s)
    return CachesCollected(gone, sum(each.size for each in before if each.path in gone), 0)


def _look_at(path: str) -> NodeCaches | None:
    try:
        fd = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None  # it is being removed, or belongs to another program
    unused_s = max(0.0, time.time() - os.fstat(fd).st_mtime)
    try:
        is_used = not try_lock(fd, USE_BYTE)
    except OSError:
        is_used = True  # without locks it is not known
    finally:
        os.close(fd)
    files = size = 0
    for directory, _, names in os.walk(path):
        for name in names:
            try:
                size += os.lstat(os.path.join(directory, name)).st_size
            except OSError:
                continue
            files += name != LOCK
    return NodeCaches(path, files, size, unused_s, is_used)
