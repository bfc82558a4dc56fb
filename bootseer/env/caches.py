"""First-step caches of a job on one node: seeded before its ranks start, captured after its first step and later.

    caches = FirstStepCaches(key, environ, url="s3://bucket/environments")
    with closing(caches):
        say(caches.seed().line)             # before ranks start; again before each attempt
        environ.update(caches.variables)
        ...                                 # ranks run
        say(caches.capture().line)          # after the first step, at checkpoints, at the end, after a crash

Nothing here fails a job: what goes wrong is one line, and a start without caches. Plain code, for a thread or a
process of its own; capturing reads and compresses, so it is for one with low priority.
"""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from bootseer import aio
from bootseer.counted import counted
from bootseer.env.caches_collect import SETTLE_S, Sum, collect
from bootseer.env.caches_document import Generation
from bootseer.env.caches_folders import KeyFolder, Place, choose, shows_reads, topology_variables
from bootseer.env.caches_kinds import NCCL, is_own
from bootseer.env.caches_merge import LIMIT_BYTES, Found, Given, Merged, merge, unit_of_path
from bootseer.env.caches_own import why_not
from bootseer.env.caches_seed import choose as choose_missing
from bootseer.env.caches_seed import unpack
from bootseer.env.caches_store import CacheStore, Newest, open_caches
from bootseer.env.caches_tidy import make_room, mark_all, tidy
from bootseer.env.caches_tree import LastTree, MergedFiles
from bootseer.env.caches_turn import WAIT_S, turn
from bootseer.errors import (
    AlreadyExists,
    BootseerError,
    IntegrityError,
    NoSuchPlace,
    NotFound,
    SourceChanged,
    StorageTimeout,
)
from bootseer.storage import HasPeers, Store
from bootseer.tree.building import build
from bootseer.tree.head import is_digest
from bootseer.trust import SigningKey, Trust

SEED_S = 30.0
SILENT_FOR_S = 60.0  # ranks do not wait for a store that did not answer so shortly before
TRIES = 6  # of a generation that another node was faster with
_MIB = 1 << 20
_MOST_NAMES = 5  # in a line
_REPLACED = "the last first-step caches are replaced by those of this node"


class Seeded(NamedTuple):
    """What a start found."""

    files: int  # that were put there; those that were there already are not counted
    size: int  # bytes of these
    generation: int  # 0: none
    took_s: float
    line: str  # for people
    is_cold: bool  # nothing could be had from the store
    is_lost: bool  # the store has some, or may have, and they cannot be used: `line` says why


class Captured(NamedTuple):
    """What a start gave."""

    generation: int  # that was published, 0 if there was nothing to publish
    files: int  # of this node that are new in it
    evicted: int  # that are in it no more
    size: int  # bytes of all its files
    took_s: float
    line: str  # for people


class FirstStepCaches:
    """The caches of one key on this node. It holds the folder as long as it is open."""

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
        limit_bytes: int = LIMIT_BYTES,
        node_type: str = "",
        store: Callable[[], Store] | None = None,
        wait_s: float = WAIT_S,
        peers: str = "",
    ) -> None:
        """
        Args:
            key: of `caches_key.make_key`. environ: that ranks will have.
            url: of the environment store; "": caches are kept on this node alone.
            trust: who is believed; by default this user's. signing_key: by default that of `trust`.
            own: further folders to be kept, by a name for each (--cache-dir NAME=DIR).
            only: names of kinds, by default all but "nccl". node_type: of `caches_key.read_node_type`.
            store: gives the store of this key instead of `url`; called on aio's loop.
            wait_s: at most so long a capture waits for those of other nodes.
            peers: path of the file of the job's peers, who are asked for what the store has; "" for none.
        Raises: ConfigError, StorageError: there is no place for caches.
        """
        if not is_digest(key):
            raise ValueError(f"{key[:80]!r} is no key")
        self._key, self._url, self._limit_bytes = key, url, limit_bytes
        self._trust = Trust.load(environ) if trust is None else trust
        self._signing_key = signing_key
        self._open_store = store or ((lambda: open_caches(url, key)) if url else None)
        self._open_reading = store or ((lambda: open_caches(url, key, peers)) if url else None)
        self._environ, self._node_type = dict(environ), node_type
        self._wait_s = wait_s
        self._silent_s = float("-inf")  # when the store did not answer
        self._given: Given | None = None
        self._sums: dict[str, Sum] = {}
        self._folder = KeyFolder(key, environ)
        try:
            chosen = choose(self._folder.path, environ, own or {}, only=only)
            self.places, self.notes = chosen.places, chosen.notes
            self._variables = chosen.variables
            self._folder.make([place for place in self.places if place.kind.name not in (own or {})])
            if not shows_reads(self._folder.path):
                self.notes.append(
                    f"{self._folder.path}: the file system does not tell which files are read:"
                    " of first-step caches the oldest go first"
                )
        except BaseException:
            self._folder.close()
            raise
        self._own = frozenset(own or {})

    @property
    def path(self) -> str:
        """The folder of this key on this node."""
        return self._folder.path

    @property
    def variables(self) -> dict[str, str]:
        """For ranks; to be asked for after `seed`. Never one that the user has set."""
        found = dict(self._variables)
        for place in self.places:
            if place.kind is NCCL:
                found.update(topology_variables(place, self._node_type, self._environ))
        return found

    def close(self) -> None:
        """Other jobs are alone with the folder from now on."""
        self._folder.close()

    # ---- before ranks start --------------------------------------------------------------------------------

    def seed(self, *, timeout_s: float = SEED_S, is_silent: bool = False) -> Seeded:
        """Brings the folders in order and fills them from the store; no rank of this job may run.

        `is_silent`: the store did not answer a moment ago: it is not waited for once more. Captures do ask it.
        Raises: NoSuchPlace for a store that can be nowhere.
        """
        started_s = time.monotonic()
        ours = [place for place in self.places if place.kind.name not in self._own]
        with self._folder.alone() as is_alone:
            if is_alone:
                tidy(ours)
                make_room(ours, self._limit_bytes)
                mark_all(ours)
        if self._open_reading is None:
            return _seeded(started_s, 0, 0, 0, "first-step caches are kept on this node alone", is_cold=False)

        if is_silent:
            self._silent_s = time.monotonic()
        if time.monotonic() - self._silent_s < SILENT_FOR_S:
            line = "first-step caches of the store are not used: it did not answer a moment ago"
            return _seeded(started_s, 0, 0, 0, line, is_cold=True, is_lost=True)

        def has_time() -> bool:
            return time.monotonic() - started_s < timeout_s

        number = 0
        self._given = Given(0, time.time_ns())
        try:
            with _opened(self._open_reading) as store:
                caches = CacheStore(store, self._key, self._trust)
                newest = aio.run_sync(caches.newest())
                generation = newest.generation
                self._note(newest if generation is not None else newest._replace(notes=newest.notes[1:]))
                if generation is None:
                    if newest.notes:
                        return _seeded(started_s, 0, 0, 0, _not_used(newest.notes[0]), is_cold=True, is_lost=True)
                    return _seeded(started_s, 0, 0, 0, "there are no first-step caches yet", is_cold=True)
                number = generation.number
                wanted = choose_missing(generation.files, self._usable())
                if not wanted:
                    self._given = Given(number, time.time_ns())
                    return _seeded(started_s, 0, 0, number, "first-step caches are all there", is_cold=False)
                with self._folder.alone() as is_alone:
                    if is_alone:  # what is there and what comes are within the limit together
                        make_room(ours, self._limit_bytes - sum(each.fact.size for each in wanted))
                if isinstance(store, HasPeers):
                    aio.run_sync(store.meet(sum(each.fact.size for each in wanted)))
                tree = aio.run_sync(caches.open(generation))
                done = unpack(wanted, tree, self._folder.path, has_time=has_time)
                self._given = Given(number, time.time_ns())
                for each in done.refused:
                    self._say(each)
        except NoSuchPlace:
            raise
        except BootseerError as error:
            self._note_silence(error)
            return _seeded(started_s, 0, 0, number, _not_used(error), is_cold=True, is_lost=True)
        line = f"first-step caches: {counted(done.files, 'file')}, {done.size / _MIB:.1f} MiB ({newest.because})"
        return _seeded(started_s, done.files, done.size, number, line, is_cold=False)

    # ---- while ranks run, and after ------------------------------------------------------------------------

    def capture(self, *, settle_s: float = SETTLE_S, pause: Callable[[float], object] = time.sleep) -> Captured:
        """Publishes what this node has made, with what others have, if that is worth it."""
        started_s = time.monotonic()
        if self._open_store is None:
            return _captured(started_s, "first-step caches are kept on this node alone")
        collected = collect(self._usable(), self._sums, settle_s=settle_s, pause=pause)
        found = collected.found
        self._tell_secrets(collected.secrets)
        if not found:
            return _captured(started_s, "there is nothing of a first step to keep")
        try:
            with _opened(self._open_store) as store:
                caches = CacheStore(store, self._key, self._trust)
                with turn(store, self._key, self._nothing_new(caches, found), wait_s=self._wait_s) as is_needed:
                    if not is_needed:
                        return _captured(started_s, "first-step caches have nothing new")
                    return self._publish(caches, found, started_s)
        except BootseerError as error:
            self._note_silence(error)
            return _captured(started_s, f"first-step caches are not kept: {error}")

    def _publish(self, caches: CacheStore, found: list[Found], started_s: float) -> Captured:
        damaged = 0  # a generation whose tree cannot be read
        for attempt in range(TRIES):
            newest = aio.run_sync(caches.newest())
            self._note(newest)
            last, tree = newest.generation, None
            if last is not None:
                is_damaged = last.number == damaged
                last, tree = (None, None) if is_damaged else aio.run_sync(self._open_last(caches, last))
            merged = self._merge(last, found, newest.next)
            if not merged.is_worth_it:
                return _captured(started_s, "first-step caches have nothing new")
            mine = {each.path: each for each in found if each.path in merged.ours}
            try:
                built = build(MergedFiles(merged.files, mine, tree), caches.put)
                generation = Generation(
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
                aio.run_sync(caches.collect_garbage())  # the next one does it otherwise
            line = (
                f"first-step caches: {merged.added} new files, {len(merged.files)} in all,"
                f" {merged.size / _MIB:.1f} MiB, generation {newest.next}"
            )
            return _captured(started_s, line, newest.next, merged.added, merged.evicted, merged.size)
        raise AssertionError("the last try returns or raises")

    def _merge(self, last: Generation | None, found: list[Found], number: int) -> Merged:
        return merge(
            last, found, int(time.time()), number=number, limit_bytes=self._limit_bytes, given=self._given
        )

    def _nothing_new(self, caches: CacheStore, found: list[Found]) -> Callable[[], Awaitable[bool]]:
        """Asks whether the store has by now what this node found; looks only at what came since it was asked."""
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

    async def _open_last(self, caches: CacheStore, last: Generation) -> tuple[Generation | None, LastTree | None]:
        """The last generation; none where its tree is gone or damaged: what this node has replaces it."""
        try:
            return last, await caches.open(last)
        except (NotFound, IntegrityError) as error:
            self._say(f"{_REPLACED}: {error}")
            return None, None

    def _usable(self) -> list[Place]:
        """The places, without own folders that others can write to: these are neither filled nor kept."""
        found = []
        for place in self.places:
            why = why_not(place) if is_own(place.kind) else ""
            if why:
                self._say(why)
            else:
                found.append(place)
        return found

    def _tell_secrets(self, paths: list[str]) -> None:
        if paths:
            names = ", ".join(paths[:_MOST_NAMES]) + (" and others" if len(paths) > _MOST_NAMES else "")
            self._say(f"warning: first-step caches: {names}: not kept, as these are credentials")

    def _note_silence(self, error: BootseerError) -> None:
        if isinstance(error, StorageTimeout):
            self._silent_s = time.monotonic()

    def _key_to_sign(self) -> SigningKey | None:
        return self._signing_key or self._trust.signing_key()

    def _note(self, newest: Newest) -> None:
        for line in newest.notes:
            self._say(line)

    def _say(self, line: str) -> None:
        if line not in self.notes:
            self.notes.append(line)


@contextmanager
def _opened(make: Callable[[], Store]) -> Iterator[Store]:
    """The store, for any number of calls of `aio.run_sync`."""

    async def begin() -> Store:
        return make()

    store = aio.run_sync(begin())
    try:
        yield store
    finally:
        aio.run_sync(store.aclose())


def _unchanged(found: list[Found]) -> list[Found]:
    """Without what is another file by now, and what is only whole with it."""
    changed = {unit_of_path(each.path) for each in found if not _is_as_found(each)}
    return [each for each in found if unit_of_path(each.path) not in changed]


def _is_as_found(each: Found) -> bool:
    try:
        return os.lstat(each.source).st_mtime_ns == each.mtime_ns
    except OSError:
        return False


def _seeded(
    started_s: float, files: int, size: int, generation: int, line: str, *, is_cold: bool, is_lost: bool = False
) -> Seeded:
    return Seeded(files, size, generation, time.monotonic() - started_s, line, is_cold, is_lost)


def _not_used(why: object) -> str:
    return f"first-step caches are not used: {why}"


def _captured(
    started_s: float, line: str, generation: int = 0, files: int = 0, evicted: int = 0, size: int = 0
) -> Captured:
    return Captured(generation, files, evicted, size, time.monotonic() - started_s, line)
