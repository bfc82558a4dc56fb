"""The garbage collection of an environment store: looks at everything, lets bootseer.env.gc decide, deletes.

Whether a lease is alive is seen by its beats, as everywhere: all leases are read twice, some beats apart. What
makes a snapshot goes first, so that none can be found while its tree goes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from bootseer import aio
from bootseer.env.gc import Generation, KeyFacts, Limits, Piece, Removal, are_reads_over, is_alive, plan
from bootseer.env.held_lease import Pause, pause_until
from bootseer.env.layout import (
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
    reads_folder,
    tree_folder,
)
from bootseer.env.lease import BEAT_S, BuilderLease, Seen
from bootseer.env.lease_record import MISSES
from bootseer.env.links import refuse_links
from bootseer.env.snapshot import MOST_ENVELOPE_BYTES, PAYLOAD_TYPE, Snapshot, decode
from bootseer.errors import ConfigError, FormatVersion, IntegrityError, NotFound, Untrusted
from bootseer.storage import Entry, Store
from bootseer.storage.below import Below
from bootseer.storage.paths import scheme_of
from bootseer.tree import index as indexes
from bootseer.tree.head import is_digest
from bootseer.tree.index import PACKS, index_path
from bootseer.tree.opening import read_index_bytes
from bootseer.trust import parse
from bootseer.trust.reading import place_of, read_whole

AT_ONCE = 8
_TRACES = "traces"

Say = Callable[[str], object]


class Collected(NamedTuple):
    """What went, or would."""

    removals: list[Removal]
    freed_bytes: int
    left_bytes: int
    leased: int  # keys whose builders live
    recent: int  # keys beyond the limit that are in use or too young


class _Looked(NamedTuple):
    facts: KeyFacts
    lease: Seen | None


async def collect(
    store: Store,
    limits: Limits,
    now_s: float,
    *,
    is_dry: bool = False,
    beat_s: float = BEAT_S,
    pause: Pause = pause_until,
    say: Say = lambda _: None,
) -> Collected:
    """Deletes what is expired, unused for too long, beyond the size limit, or of builds that never ended.

    Raises: ConfigError for a store that is only read; Untrusted for one whose folders are links; StorageError.
    """
    if scheme_of(store.url) in ("http", "https"):
        raise ConfigError(f"{store.url}: is a web server, which is only read: collect where its files are")
    await refuse_links(store, KEYS, TREES)
    leases = BuilderLease(store, owner="gc", beat_s=beat_s, clock=time.monotonic, pause=pause)
    names = sorted({entry.name for folder in (KEYS, TREES) for entry in await _list(store, folder)})
    keys = [name for name in names if is_key(name)]

    async def look(key: str) -> _Looked | None:
        try:
            return await _look(store, leases, key, now_s, say)
        except Untrusted as error:  # links
            say(str(error))
            return None

    looked = [each for each in await aio.map_bounded(look, keys, width=AT_ONCE) if each is not None]
    alive = await _living(leases, looked, pause)
    done = plan([each.facts._replace(is_leased=each.facts.key in alive) for each in looked], limits, now_s)
    if not is_dry:
        seen = {each.facts.key: each.lease for each in looked}
        gone = [each for each in done.removals if await _remove(store, leases, each, seen, say)]
        kept = sum(each.freed_bytes for each in done.removals) - sum(each.freed_bytes for each in gone)
        done = done._replace(removals=gone, left_bytes=done.left_bytes + kept)
        await _remove_reads(store, limits, now_s, say)
    freed = sum(each.freed_bytes for each in done.removals)
    return Collected(done.removals, freed, done.left_bytes, done.leased, done.recent)


async def _remove_reads(store: Store, limits: Limits, now_s: float, say: Say) -> None:
    """Lists of what set-ups have read that nobody uses. Who is about to use one runs set-up."""
    await refuse_links(store, READS)
    for guess in await _list(store, READS):
        if not is_key(guess.name):
            continue
        try:
            await refuse_links(store, reads_folder(guess.name))
        except Untrusted as error:
            say(str(error))
            continue
        used_s = max((entry.mtime_s for entry in await _list(store, reads_folder(guess.name))), default=0.0)
        if are_reads_over(used_s, limits, now_s):
            await store.delete(reads_folder(guess.name))


async def _look(store: Store, leases: BuilderLease, key: str, now_s: float, say: Say) -> _Looked:
    """Raises: Untrusted for links."""
    tree = tree_folder(key)
    folders = [f"{tree}/{name}" for name in ("index", PACKS)]
    await refuse_links(store, key_folder(key), *folders, f"{tree}/{_TRACES}")
    entries = await _list(store, key_folder(key))
    generations: list[Generation] = []
    live = set[str]()  # tree digests
    is_known = True
    for entry in entries:
        number = generation_of(entry.name)
        if not number:
            continue
        try:
            snapshot = await _read(store, key, number, say)
        except FormatVersion as error:  # what a newer version needs is not known
            say(str(error))
            generations.append(Generation(number, entry.mtime_s, None))
            is_known = False
            continue
        if snapshot is None:
            continue
        generation = Generation(number, snapshot.created_s, snapshot.expires_s)
        generations.append(generation)
        if is_alive(generation, now_s):
            live.add(snapshot.tree)
    pieces = []
    for folder in folders:
        for entry in await _list(store, folder):
            if is_digest(entry.name) and not entry.is_folder:
                pieces.append(Piece(f"{folder}/{entry.name}", entry.size, entry.mtime_s))
    needed = await _needed(store, key, live, say) if is_known else None
    ours = [
        entry
        for entry in entries
        if entry.name in (DOCUMENT, USED) or generation_of(entry.name) or lease_number_of(entry.name)
    ]
    times_s = [*(entry.mtime_s for entry in ours), *(piece.mtime_s for piece in pieces)]
    used_s = [
        *(entry.mtime_s for entry in entries if entry.name == USED or generation_of(entry.name)),
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
    return _Looked(facts, await leases.look(key))


async def _living(leases: BuilderLease, looked: list[_Looked], pause: Pause) -> set[str]:
    """Keys whose leases change while they are looked at."""
    working = {each.facts.key: each.lease for each in looked if each.lease is not None and each.lease.is_working}
    if not working:
        return set()
    await pause((MISSES + 0.5) * leases.beat_s, asyncio.Event())
    return {key for key, seen in working.items() if _has_moved(seen, await leases.look(key))}


def _has_moved(before: Seen | None, now: Seen | None) -> bool:
    """Whether somebody works on it now who did something since then."""
    if now is None or not now.is_working:
        return False
    return before is None or (before.number, before.token) != (now.number, now.token)


async def _remove(
    store: Store, leases: BuilderLease, removal: Removal, seen: dict[str, Seen | None], say: Say
) -> bool:
    """Whether it went: somebody may have begun to build meanwhile."""
    key = removal.key
    if _has_moved(seen[key], await leases.look(key)):
        say(f"{key_folder(key)}: is left, as somebody builds it anew")
        return False
    if removal.paths:
        await aio.map_bounded(store.delete, removal.paths, width=AT_ONCE)
        return True
    numbers = sorted(
        (number for entry in await _list(store, key_folder(key)) if (number := generation_of(entry.name))),
        reverse=True,
    )
    for number in numbers:  # from above: who cannot list finds no gap
        await store.delete(env_path(key, number))
    await store.delete(tree_folder(key))
    await store.delete(key_folder(key))
    return True


async def _needed(store: Store, key: str, digests: set[str], say: Say) -> frozenset[str] | None:
    """Paths of what the trees need; None when an index cannot be read."""
    folder = tree_folder(key)
    place = Below(store, folder)
    paths = set[str]()
    for digest in digests:
        try:
            data = await read_index_bytes(place, digest)
            index = await aio.run_io(indexes.decode, data, digest, place_of(place, index_path(digest)))
        except (NotFound, IntegrityError) as error:
            say(f"warning: the tree cannot be used: {error}")
            return None
        paths.add(f"{folder}/{index_path(digest)}")
        paths |= {f"{folder}/{index.pack_path(pack)}" for pack in range(len(index.packs))}
    return frozenset(paths)


async def _read(store: Store, key: str, number: int, say: Say) -> Snapshot | None:
    """Whoever signed it: what others believe stays too. Raises: FormatVersion; StorageError."""
    path = env_path(key, number)
    where = place_of(store, path)
    try:
        await refuse_links(store, path)
        data = await read_whole(store, path, MOST_ENVELOPE_BYTES)
        snapshot = decode(parse(data, PAYLOAD_TYPE, where, most_bytes=MOST_ENVELOPE_BYTES).payload, where)
    except FormatVersion:
        raise
    except (NotFound, IntegrityError) as error:
        say(str(error))
        return None
    return snapshot if snapshot.key == key else None


async def _list(store: Store, folder: str) -> list[Entry]:
    try:
        return await store.list(folder)
    except NotFound:
        return []
