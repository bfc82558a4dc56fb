"""Compile caches of a job on one node: seeded before its ranks start, captured after the first step and later.

    caches = FirstStepCaches(key, environ, url="s3://bucket/environments")
    with closing(caches):
        say(caches.seed().line)             # before ranks start; again before each attempt
        environ.update(caches.variables)
        ...                                 # ranks run
        say(caches.capture().line)          # after the first step, at checkpoints, at the end, after a crash

No error here fails a job: the caller gets one line, and ranks start without caches. This is blocking code for a
thread or process of its own. Capturing reads and compresses, so it belongs in a process with low priority.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from bootseer import aio
from bootseer.counted import counted
from bootseer.env.compile_cache.collect import SETTLE_S, FileFacts, collect
from bootseer.env.compile_cache.directories import (
    CachePlace,
    KeyDirectory,
    choose_caches,
    shows_reads,
    topology_variables,
)
from bootseer.env.compile_cache.document import CacheGeneration
from bootseer.env.compile_cache.kinds import NCCL, is_own
from bootseer.env.compile_cache.merge import (
    FoundFile,
    MergedGeneration,
    SeedState,
    merge,
    unit_of_path,
)
from bootseer.env.compile_cache.seed import find_missing as choose_missing
from bootseer.env.compile_cache.seed import unpack
from bootseer.env.compile_cache.store import CacheStore, NewestGeneration, open_caches
from bootseer.env.compile_cache.tidy import make_room, mark_all, tidy
from bootseer.env.compile_cache.tree import LastTree, MergedFiles
from bootseer.env.compile_cache.turn import WAIT_S, publish_turn
from bootseer.env.compile_cache.user_directory import why_unusable
from bootseer.errors import (
    AlreadyExists,
    BootseerError,
    IntegrityError,
    NoSuchLocation,
    NotFound,
    SourceChanged,
    StorageTimeout,
)
from bootseer.storage import HasPeers, Store
from bootseer.tree.builder.building import build
from bootseer.tree.head import is_digest
from bootseer.trust import SigningKey, Trust
from bootseer.tuning import current

SILENT_FOR_S = 60.0  # after a store did not answer, ranks do not wait for it for so long
TRIES = 6  # to publish a generation, if other nodes are faster
_MIB = 1 << 20
_MAX_NAMES = 5  # in a line
_REPLACED = "the compile caches of this node replace the last ones"


class Seeded(NamedTuple):
    """The result of `seed`."""

    files: int  # that were added; those that existed already are not counted
    size: int  # bytes of these
    generation: int  # 0: none
    took_s: float
    line: str  # for people
    is_cold: bool  # nothing came from the store
    is_lost: bool  # the store has caches, or may have, but they cannot be used: `line` has the reason


class Captured(NamedTuple):
    """The result of `capture`."""

    generation: int  # that was published, 0 if there was nothing to publish
    files: int  # files of this node that are new in it
    evicted: int  # files that were removed
    size: int  # bytes of all its files
    took_s: float
    line: str  # for people
    has_failed: bool = False  # new files could not be published


class FirstStepCaches:
    """The caches of one key on this node. It locks the directory as long as it is open."""

    def __init__(
        self,
        key: str,
        environ: Mapping[str, str],
        *,
        url: str = "",
        trust: Trust | None = None,
        signing_key: SigningKey | None = None,
        own: Mapping[str, str] | None = None,
        only: Collection[str] = (),
        limit_bytes: int | None = None,
        node_type: str = "",
        store: Callable[[], Store] | None = None,
        wait_s: float = WAIT_S,
        peers: str = "",
    ) -> None:
        """
        Args:
            key: of `key.make_key`. environ: of the ranks.
            url: of the environment store; "": caches are kept on this node only.
            trust: the trusted keys; by default this user's. signing_key: by default that of `trust`.
            own: further directories to keep, by a name for each (--cache-dir NAME=DIR).
            only: names of kinds, by default all but "nccl". node_type: of `key.read_node_type`.
            limit_bytes: of all files; None: `env.cache_bytes` of `tuning`.
            store: returns the store of this key in place of `url`; called on aio's loop.
            wait_s: the longest time that a capture waits for those of other nodes.
            peers: path of the file that lists the job's peers, which also serve files of the store; "" for none.
        Raises: ConfigError, StorageError: there is no directory for caches.
        """
        if not is_digest(key):
            raise ValueError(f"{key[:80]!r} is not a key")
        self._key, self._url = key, url
        self._limit_bytes = current().env.cache_bytes if limit_bytes is None else limit_bytes
        self._trust = Trust.load(environ) if trust is None else trust
        self._signing_key = signing_key
        self._open_store = store or ((lambda: open_caches(url, key)) if url else None)
        self._open_reading = store or ((lambda: open_caches(url, key, peers)) if url else None)
        self._environ, self._node_type = dict(environ), node_type
        self._wait_s = wait_s
        self._silent_s = float("-inf")  # when the store did not answer
        self._given: SeedState | None = None
        self._sums: dict[str, FileFacts] = {}
        self._directory = KeyDirectory(key, environ)
        try:
            chosen = choose_caches(self._directory.path, environ, own or {}, only=only)
            self.places, self.notes = chosen.places, chosen.notes
            self._variables = chosen.variables
            self._directory.make([place for place in self.places if place.kind.name not in (own or {})])
            if not shows_reads(self._directory.path):
                self.notes.append(
                    f"{self._directory.path}: the file system does not record which files are read:"
                    " the oldest compile caches are evicted first"
                )
        except BaseException:
            self._directory.close()
            raise
        self._own = frozenset(own or {})

    @property
    def path(self) -> str:
        """The directory of this key on this node."""
        return self._directory.path

    @property
    def variables(self) -> dict[str, str]:
        """The variables for ranks, to read after `seed`. Variables that the user has set are not among them."""
        found = dict(self._variables)
        for place in self.places:
            if place.kind is NCCL:
                found.update(topology_variables(place, self._node_type, self._environ))
        return found

    def close(self) -> None:
        """Release the directory for other jobs."""
        self._directory.close()

    # ---- before ranks start --------------------------------------------------------------------------------

    def seed(self, *, timeout_s: float | None = None, is_silent: bool = False) -> Seeded:
        """Tidy the directories and fill them from the store, while no rank of this job runs.

        `is_silent`: the store did not answer a moment ago, so do not wait for it again. Captures still query it.
        Raises: NoSuchLocation for a store that cannot exist.
        """
        started_s = time.monotonic()
        limit_s = current().env.cache_seed_s if timeout_s is None else timeout_s
        ours = [place for place in self.places if place.kind.name not in self._own]
        with self._directory.alone() as is_alone:
            if is_alone:
                tidy(ours)
                make_room(ours, self._limit_bytes)
                mark_all(ours)
        if self._open_reading is None:
            return _seeded(started_s, 0, 0, 0, "compile caches are kept on this node only", is_cold=False)

        if is_silent:
            self._silent_s = time.monotonic()
        if time.monotonic() - self._silent_s < SILENT_FOR_S:
            line = "compile caches are not used: the store did not answer a moment ago"
            return _seeded(started_s, 0, 0, 0, line, is_cold=True, is_lost=True)

        def has_time() -> bool:
            return time.monotonic() - started_s < limit_s

        number = 0
        self._given = SeedState(0, time.time_ns())
        try:
            with _opened(self._open_reading) as store:
                caches = CacheStore(store, self._key, self._trust)
                newest = aio.run_sync(caches.newest())
                generation = newest.generation
                self._note(newest if generation is not None else newest._replace(notes=newest.notes[1:]))
                if generation is None:
                    if newest.notes:
                        return _seeded(started_s, 0, 0, 0, _not_used(newest.notes[0]), is_cold=True, is_lost=True)
                    return _seeded(started_s, 0, 0, 0, "the store has no compile caches yet", is_cold=True)
                number = generation.number
                wanted = choose_missing(generation.files, self._usable())
                if not wanted:
                    self._given = SeedState(number, time.time_ns())
                    return _seeded(started_s, 0, 0, number, "compile caches are complete", is_cold=False)
                with self._directory.alone() as is_alone:
                    if is_alone:  # old and new files together stay within the limit
                        make_room(ours, self._limit_bytes - sum(each.fact.size for each in wanted))
                if isinstance(store, HasPeers):
                    aio.run_sync(store.meet(sum(each.fact.size for each in wanted)))
                tree = aio.run_sync(caches.open(generation))
                done = unpack(wanted, tree, self._directory.path, has_time=has_time)
                self._given = SeedState(number, time.time_ns())
                for each in done.refused:
                    self._say(each)
        except NoSuchLocation:
            raise
        except BootseerError as error:
            self._record_timeout(error)
            return _seeded(started_s, 0, 0, number, _not_used(error), is_cold=True, is_lost=True)
        line = f"compile caches: {counted(done.files, 'file')}, {done.size / _MIB:.1f} MiB ({newest.because})"
        return _seeded(started_s, done.files, done.size, number, line, is_cold=False)

    # ---- while ranks run, and after ------------------------------------------------------------------------

    def capture(self, *, settle_s: float = SETTLE_S, pause: Callable[[float], object] = time.sleep) -> Captured:
        """Publish the files of this node, merged with those of other nodes, if enough is new."""
        started_s = time.monotonic()
        if self._open_store is None:
            return _captured(started_s, "compile caches are kept on this node only")
        collected = collect(self._usable(), self._sums, settle_s=settle_s, pause=pause)
        found = collected.found
        self._report_secrets(collected.secrets)
        if not found:
            return _captured(started_s, "there are no files of compile caches to publish")
        try:
            with _opened(self._open_store) as store:
                caches = CacheStore(store, self._key, self._trust)
                with publish_turn(
                    store, self._key, self._nothing_new(caches, found), wait_s=self._wait_s
                ) as is_needed:
                    if not is_needed:
                        return _captured(started_s, "compile caches have no new files")
                    return self._publish(caches, found, started_s)
        except BootseerError as error:
            self._record_timeout(error)
            return _captured(started_s, f"compile caches are not published: {error}")._replace(has_failed=True)

    def _publish(self, caches: CacheStore, found: list[FoundFile], started_s: float) -> Captured:
        damaged = 0  # number of a generation whose tree cannot be read
        for attempt in range(TRIES):
            newest = aio.run_sync(caches.newest())
            self._note(newest)
            last, tree = newest.generation, None
            if last is not None:
                is_damaged = last.number == damaged
                last, tree = (None, None) if is_damaged else aio.run_sync(self._open_last(caches, last))
            merged = self._merge(last, found, newest.next)
            if not merged.is_worth_it:
                return _captured(started_s, "compile caches have no new files")
            mine = {each.path: each for each in found if each.path in merged.ours}
            try:
                built = build(MergedFiles(merged.files, mine, tree), caches.put)
                generation = CacheGeneration(
                    key=self._key,
                    number=newest.next,
                    tree=built.digest,
                    index_bytes=len(built.index_bytes),
                    made_s=int(time.time()),
                    files=merged.files,
                )
                packs = [digest.hex() for digest, _ in built.tree.packs]
                aio.run_sync(caches.publish(generation, built.index_bytes, packs, self._key_to_sign()))
            except (AlreadyExists, SourceChanged):
                if attempt == TRIES - 1:
                    raise
                found = _unchanged(found)
                continue
            except (NotFound, IntegrityError) as error:
                if last is None or attempt == TRIES - 1:
                    raise
                damaged = last.number
                self._say(f"{_REPLACED}: {error}")
                continue
            with suppress(BootseerError):
                aio.run_sync(caches.collect_garbage())  # else the next capture does it
            line = (
                f"compile caches: {merged.added} new files, {len(merged.files)} in total,"
                f" {merged.size / _MIB:.1f} MiB, generation {newest.next}"
            )
            return _captured(started_s, line, newest.next, merged.added, merged.evicted, merged.size)
        raise AssertionError("the last try returns or raises")

    def _merge(self, last: CacheGeneration | None, found: list[FoundFile], number: int) -> MergedGeneration:
        return merge(
            last, found, int(time.time()), number=number, limit_bytes=self._limit_bytes, given=self._given
        )

    def _nothing_new(self, caches: CacheStore, found: list[FoundFile]) -> Callable[[], Awaitable[bool]]:
        """Return a check whether the store already has the found files; it reads only newer generations."""
        seen = -1

        async def ask() -> bool:
            nonlocal seen
            number = await caches.newest_number()
            if number == seen:
                return False
            seen = number
            newest = await caches.newest()
            last = newest.generation
            if last is not None:
                last, _ = await self._open_last(caches, last)
            merged = await aio.run_io(self._merge, last, found, newest.next)
            return not merged.is_worth_it

        return ask

    async def _open_last(
        self, caches: CacheStore, last: CacheGeneration
    ) -> tuple[CacheGeneration | None, LastTree | None]:
        """Open the last generation; None if its tree is missing or damaged: then this node's files replace it."""
        try:
            return last, await caches.open(last)
        except (NotFound, IntegrityError) as error:
            self._say(f"{_REPLACED}: {error}")
            return None, None

    def _usable(self) -> list[CachePlace]:
        """Return the places without own directories that other users can write to: these are skipped."""
        found = []
        for place in self.places:
            why = why_unusable(place) if is_own(place.kind) else ""
            if why:
                self._say(why)
            else:
                found.append(place)
        return found

    def _report_secrets(self, paths: list[str]) -> None:
        if paths:
            names = ", ".join(paths[:_MAX_NAMES]) + (" and others" if len(paths) > _MAX_NAMES else "")
            self._say(f"warning: compile caches: {names}: not published: these are credentials")

    def _record_timeout(self, error: BootseerError) -> None:
        if isinstance(error, StorageTimeout):
            self._silent_s = time.monotonic()

    def _key_to_sign(self) -> SigningKey | None:
        return self._signing_key or self._trust.signing_key()

    def _note(self, newest: NewestGeneration) -> None:
        for line in newest.notes:
            self._say(line)

    def _say(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)


@contextmanager
def _opened(make: Callable[[], Store]) -> Iterator[Store]:
    """Open the store for any number of calls of `aio.run_sync`."""

    async def begin() -> Store:
        return make()

    store = aio.run_sync(begin())
    try:
        yield store
    finally:
        aio.run_sync(store.aclose())


def _unchanged(found: list[FoundFile]) -> list[FoundFile]:
    """Return the files that have not changed since, without units that are incomplete then."""
    changed = {unit_of_path(each.path) for each in found if not _is_as_found(each)}
    return [each for each in found if unit_of_path(each.path) not in changed]


def _is_as_found(each: FoundFile) -> bool:
    try:
        return os.lstat(each.source).st_mtime_ns == each.mtime_ns
    except OSError:
        return False


def _seeded(
    started_s: float, files: int, size: int, generation: int, line: str, *, is_cold: bool, is_lost: bool = False
) -> Seeded:
    return Seeded(files, size, generation, time.monotonic() - started_s, line, is_cold, is_lost)


def _not_used(why: object) -> str:
    return f"compile caches are not used: {why}"


def _captured(
    started_s: float, line: str, generation: int = 0, files: int = 0, evicted: int = 0, size: int = 0
) -> Captured:
    return Captured(generation, files, evicted, size, time.monotonic() - started_s, line)
