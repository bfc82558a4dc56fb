"""Collects the garbage of an environment store: lists its files, lets bootseer.env.store.gc decide, and deletes.

A lease is alive if its holder renews it: all leases are read twice, several heartbeats apart. The documents of a
snapshot are deleted first, so that no reader finds it while its tree is being deleted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.counted import format_time
from bootseer.env.store.gc import (
    RECENT_S,
    KeyFacts,
    Limits,
    Removal,
    SnapshotGeneration,
    TreeFile,
    are_reads_over,
    is_alive,
    is_recent,
    plan,
)
from bootseer.env.store.held_lease import Pause, pause_until
from bootseer.env.store.lease import HEARTBEAT_S, BuilderLease, ObservedLease
from bootseer.env.store.lease_record import MAX_MISSED
from bootseer.env.store.links import refuse_links
from bootseer.env.store.snapshot import MAX_ENVELOPE_BYTES, PAYLOAD_TYPE, Snapshot, decode
from bootseer.env.store_layout import (
    DOCUMENT,
    KEYS,
    READS,
    TREES,
    USED,
    env_path,
    generation_of,
    is_key,
    key_folder,
    lease_number_of,
    reads_directory,
    tree_directory,
    tree_used_directory,
)
from bootseer.errors import ConfigError, EnvError, FormatVersion, IntegrityError, NotFound, Untrusted
from bootseer.logs import get_logger
from bootseer.storage import Store
from bootseer.storage.below import SubdirectoryStore
from bootseer.storage.paths import is_web
from bootseer.storage.small_files import list_if_there, read_small, url_of
from bootseer.tree import index as indexes
from bootseer.tree.head import is_digest
from bootseer.tree.index import PACKS, index_path
from bootseer.tree.opening import read_index_bytes
from bootseer.trust import parse

_log = get_logger(__name__)

AT_ONCE = 8
_TRACES = "traces"


class GcResult(NamedTuple):
    """The result of a collection, or of a dry run."""

    removals: list[Removal]
    freed_bytes: int
    left_bytes: int
    leased: int  # keys whose builders are alive
    recent: int  # keys beyond the limits that are in use or too young


class RemoveResult(NamedTuple):
    """The result of the removal of keys, or of a dry run."""

    removals: list[Removal]
    freed_bytes: int


class _KeyState(NamedTuple):
    facts: KeyFacts
    lease: ObservedLease | None


def refuse_web_server(store: Store) -> None:
    """Raises: ConfigError for a store from which nothing can be deleted."""
    if is_web(store.url):
        raise ConfigError(f"{store.url}: is a web server, which is read-only; collect where its files are")


async def collect(
    store: Store,
    limits: Limits,
    now_s: float,
    *,
    is_dry: bool = False,
    beat_s: float = HEARTBEAT_S,
    pause: Pause = pause_until,
) -> GcResult:
    """Delete files that are expired, unused for too long, beyond the size limit, or of incomplete builds.

    Raises: ConfigError for a read-only store; Untrusted for one whose directories are links; StorageError.
    """
    refuse_web_server(store)
    await refuse_links(store, KEYS, TREES)
    leases = BuilderLease(store, owner="gc", beat_s=beat_s, clock=time.monotonic, pause=pause)
    names = sorted({entry.name for directory in (KEYS, TREES) for entry in await list_if_there(store, directory)})
    keys = [name for name in names if is_key(name)]

    async def look(key: str) -> _KeyState | None:
        try:
            return await _look(store, leases, key, now_s)
        except Untrusted as error:  # links
            _log.info("%s", error)
            return None

    looked = [each for each in await aio.map_bounded(look, keys, width=AT_ONCE) if each is not None]
    alive = await _living(leases, looked, pause)
    done = plan([each.facts._replace(is_leased=each.facts.key in alive) for each in looked], limits, now_s)
    if not is_dry:
        seen = {each.facts.key: each.lease for each in looked}
        gone = [each for each in done.removals if await _remove(store, leases, each, seen)]
        kept = sum(each.freed_bytes for each in done.removals) - sum(each.freed_bytes for each in gone)
        done = done._replace(removals=gone, left_bytes=done.left_bytes + kept)
        await _remove_reads(store, limits, now_s)
    freed = sum(each.freed_bytes for each in done.removals)
    return GcResult(done.removals, freed, done.left_bytes, done.leased, done.recent)


async def remove(
    store: Store,
    keys: Sequence[str],
    now_s: float,
    *,
    is_forced: bool = False,
    is_dry: bool = False,
    beat_s: float = HEARTBEAT_S,
    pause: Pause = pause_until,
) -> RemoveResult:
    """Delete keys with all their files; none if one cannot be deleted. Args: is_forced: also if jobs use them.

    Raises: ConfigError for a read-only store; NotFound for a key without files; EnvError for keys that are in use
        or being built; Untrusted for a store whose directories are links; StorageError.
    """
    refuse_web_server(store)
    await refuse_links(store, KEYS, TREES)
    leases = BuilderLease(store, owner="rm", beat_s=beat_s, clock=time.monotonic, pause=pause)

    async def look(key: str) -> _KeyState:
        found = await _look(store, leases, key, now_s)
        if not (found.facts.generations or found.facts.youngest_s or found.lease):
            raise NotFound(f"{store.url}: has no environment of the key {key}; `bootseer env list` shows them")
        return found

    looked = await aio.map_bounded(look, list(dict.fromkeys(keys)), width=AT_ONCE)
    if built := await _living(leases, looked, pause):
        raise EnvError(f"{_named(built)}: not deleted: it is being built; repeat this after the build")
    recent = [each.facts.key for each in looked if is_recent(each.facts, now_s)]
    if recent and not is_forced:
        raise EnvError(
            f"{_named(recent)}: not deleted: it was used or stored within {format_time(RECENT_S)}, so a job may"
            " have it mounted; --force deletes it"
        )
    removals = [Removal(each.facts.key, (), each.facts.stored_bytes, "was named") for each in looked]
    if not is_dry:
        seen = {each.facts.key: each.lease for each in looked}
        gone = [each for each in removals if await _remove(store, leases, each, seen)]
        if kept := {each.key for each in removals} - {each.key for each in gone}:
            raise EnvError(f"{_named(kept)}: not deleted: it is being built; repeat this after the build")
    return RemoveResult(removals, sum(each.freed_bytes for each in removals))


def _named(keys: Iterable[str]) -> str:
    return ", ".join(key[:16] for key in sorted(keys))


async def _remove_reads(store: Store, limits: Limits, now_s: float) -> None:
    """Remove lists of set-up reads that no job uses. A start that misses one runs set-up."""
    await refuse_links(store, READS)
    for guess in await list_if_there(store, READS):
        if not is_key(guess.name):
            continue
        try:
            await refuse_links(store, reads_directory(guess.name))
        except Untrusted as error:
            _log.info("%s", error)
            continue
        used_s = max(
            (entry.mtime_s for entry in await list_if_there(store, reads_directory(guess.name))), default=0.0
        )
        if are_reads_over(used_s, limits, now_s):
            await store.delete(reads_directory(guess.name))


async def _look(store: Store, leases: BuilderLease, key: str, now_s: float) -> _KeyState:
    """Collect the facts of a key. Raises: Untrusted for links."""
    tree = tree_directory(key)
    directories = [f"{tree}/{name}" for name in ("index", PACKS)]
    await refuse_links(store, key_folder(key), *directories, f"{tree}/{_TRACES}", tree_used_directory(key))
    entries = await list_if_there(store, key_folder(key))
    generations: list[SnapshotGeneration] = []
    live = set[str]()  # tree digests
    stamps = await list_if_there(store, tree_used_directory(key))
    mounted = {entry.name for entry in stamps if now_s - entry.mtime_s < RECENT_S}  # by running jobs
    is_known = True
    for entry in entries:
        number = generation_of(entry.name)
        if not number:
            continue
        try:
            snapshot = await _read(store, key, number)
        except FormatVersion as error:  # the files that a newer version needs are not known
            _log.info("%s", error)
            generations.append(SnapshotGeneration(number, entry.mtime_s, None))
            is_known = False
            continue
        if snapshot is None:
            continue
        generation = SnapshotGeneration(number, snapshot.created_s, snapshot.expires_s)
        generations.append(generation)
        if is_alive(generation, now_s) or snapshot.tree in mounted:
            live.add(snapshot.tree)
    pieces = []
    for directory in directories:
        for entry in await list_if_there(store, directory):
            if is_digest(entry.name) and not entry.is_folder:
                pieces.append(TreeFile(f"{directory}/{entry.name}", entry.size, entry.mtime_s))
    needed = await _needed(store, key, live) if is_known else None
    ours = [
        entry
        for entry in entries
        if entry.name in (DOCUMENT, USED) or generation_of(entry.name) or lease_number_of(entry.name)
    ]
    times_s = [entry.mtime_s for entry in (*ours, *stamps)] + [piece.mtime_s for piece in pieces]
    used_s = [
        *(entry.mtime_s for entry in entries if entry.name == USED or generation_of(entry.name)),
        *(entry.mtime_s for entry in stamps),
        *(each.created_s for each in generations if each.created_s <= now_s),
    ]
    facts = KeyFacts(
        key=key,
        generations=tuple(generations),
        pieces=tuple(pieces),
        needed=needed,
        used_s=max(used_s, default=0.0),
        youngest_s=max(times_s, default=0.0),
        is_leased=False,
    )
    return _KeyState(facts, await leases.look(key, is_logged=False))


async def _living(leases: BuilderLease, looked: list[_KeyState], pause: Pause) -> set[str]:
    """Return the keys whose leases change between two samples."""
    working = {each.facts.key: each.lease for each in looked if each.lease is not None and each.lease.is_working}
    if not working:
        return set()
    await pause((MAX_MISSED + 0.5) * leases.beat_s, asyncio.Event())
    return {key for key, seen in working.items() if _has_moved(seen, await leases.look(key, is_logged=False))}


def _has_moved(before: ObservedLease | None, now: ObservedLease | None) -> bool:
    """Return whether a builder is working on it and has renewed its lease since `before`."""
    if now is None or not now.is_working:
        return False
    return before is None or (before.number, before.token) != (now.number, now.token)


async def _remove(
    store: Store, leases: BuilderLease, removal: Removal, seen: dict[str, ObservedLease | None]
) -> bool:
    """Carry out a removal; False if another process has begun to build meanwhile."""
    key = removal.key
    if _has_moved(seen[key], await leases.look(key, is_logged=False)):
        _log.info("%s: kept: another process is building it again", key_folder(key))
        return False
    if removal.paths:
        await aio.map_bounded(store.delete, removal.paths, width=AT_ONCE)
        return True
    numbers = sorted(
        (number for entry in await list_if_there(store, key_folder(key)) if (number := generation_of(entry.name))),
        reverse=True,
    )
    for number in numbers:  # highest first: a reader that cannot list finds no gap
        await store.delete(env_path(key, number))
    await store.delete(tree_directory(key))
    await store.delete(key_folder(key))
    return True


async def _needed(store: Store, key: str, digests: set[str]) -> frozenset[str] | None:
    """Return the paths of all files that the trees need; None if an index cannot be read."""
    directory = tree_directory(key)
    place = SubdirectoryStore(store, directory)
    paths = set[str]()
    for digest in digests:
        try:
            data = await read_index_bytes(place, digest)
            index = await aio.run_io(indexes.decode, data, digest, url_of(place, index_path(digest)))
        except (NotFound, IntegrityError) as error:
            _log.warning("the tree cannot be used: %s", error)
            return None
        paths.add(f"{directory}/{index_path(digest)}")
        paths |= {f"{directory}/{index.pack_path(pack)}" for pack in range(len(index.packs))}
    return frozenset(paths)


async def _read(store: Store, key: str, number: int) -> Snapshot | None:
    """Read a snapshot without checking its signature: others may trust it. Raises: FormatVersion; StorageError."""
    path = env_path(key, number)
    where = url_of(store, path)
    try:
        await refuse_links(store, path)
        data = await read_small(store, path, MAX_ENVELOPE_BYTES)
        snapshot = decode(parse(data, PAYLOAD_TYPE, where, max_bytes=MAX_ENVELOPE_BYTES).payload, where)
    except FormatVersion:
        raise
    except (NotFound, IntegrityError) as error:
        _log.info("%s", error)
        return None
    return snapshot if snapshot.key == key else None
