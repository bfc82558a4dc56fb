"""Compile caches in a store: reads the newest trusted generation, publishes the next one, collects garbage.

    caches/KEY/cache-000007.json   signed like trees; created if absent; with it the generation exists
    caches/KEY/newest.json         a hint for stores that cannot list; it is not trusted
    caches/KEY/index/, packs/      the trees of all generations, by content: equal packs are stored once
    caches/KEY/keys/KEY/lease-*    the lease of the node that may publish (turn.py)

Ranks run these files as code: only files of the requested key that `Trust` accepts are read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.env.compile_cache.document import (
    MAX_ENVELOPE_BYTES,
    MAX_NUMBER,
    PAYLOAD_TYPE,
    CacheGeneration,
    decode,
    encode,
    name_of,
    number_of,
)
from bootseer.env.compile_cache.tree import LastTree, entries_of
from bootseer.errors import (
    ConfigError,
    IntegrityError,
    NotFound,
    SourceChanged,
    StorageError,
    StorageTimeout,
    Untrusted,
)
from bootseer.storage import Entry, Store, open_store
from bootseer.storage.local_stores import local_disk_directory_of
from bootseer.storage.paths import is_chained
from bootseer.storage.small_files import list_if_there, read_small, url_of
from bootseer.tree.head import is_digest
from bootseer.tree.index import decode as decode_index
from bootseer.tree.index import index_path
from bootseer.tree.opening import publish_index, read_index_bytes
from bootseer.tree.pack_folder import PackWriter
from bootseer.tree.reading import StoreBlocks
from bootseer.trust import SigningKey, Trust, seal

DIRECTORY = "caches"
GRACE_S = 3600.0  # the files of a generation are kept so long after the next one is published
_HINT = "newest.json"
_MAX_TRIED = 8  # untrusted files, after which lower numbers are not tried
_KEPT = 2
_MAX_HINT_BYTES = 4096
_DELETES_AT_ONCE = 8


class NewestGeneration(NamedTuple):
    generation: CacheGeneration | None
    because: str  # why it is trusted
    next: int  # the number of the next one
    notes: list[str]  # the files that are not trusted


class _Hint(msgspec.Struct):
    number: int


def open_caches(url: str, key: str, peers: str = "") -> Store:
    """Open the store of one key's caches below an environment store. Call it on aio's loop.

    Args: peers: path of the file that lists the job's peers, which are queried for packs first; then the store is
    read-only. Raises: ConfigError.
    """
    found = caches_url(url, key)
    if not peers or local_disk_directory_of(found):
        return open_store(found)
    from bootseer.peers import open_peer_store

    return open_peer_store(found, peers)


def caches_url(url: str, key: str) -> str:
    """Return the URL of the store of one key's caches. Raises: ConfigError."""
    if not is_digest(key):
        raise ConfigError(f"{key[:80]!r} is not a key of caches; a key has 64 hex digits")
    return _below(url, f"{DIRECTORY}/{key}")


def _below(url: str, directory: str) -> str:
    if is_chained(url):
        first, mark, rest = url.partition("::")
        if "://" not in first:
            raise ConfigError(f"{url}: name a directory in it")
        return f"{first.rstrip('/')}/{directory}{mark}{rest}"
    head, mark, query = url.partition("?") if url.startswith(("http://", "https://")) else (url, "", "")
    return f"{head.rstrip('/')}/{directory}{mark}{query}"


class CacheStore:
    """The caches of one key, in the root of `store`."""

    def __init__(self, store: Store, key: str, trust: Trust) -> None:
        self._store = store
        self._packs = PackWriter(store)
        self._key = key
        self._trust = trust

    async def newest(self) -> NewestGeneration:
        """Read the newest trusted generation. Raises: StorageError."""
        numbers = await self._numbers()
        notes: list[str] = []
        for number in sorted(numbers, reverse=True)[:_MAX_TRIED]:
            try:
                generation, because = await self._read(number)
            except NotFound:
                continue  # removed meanwhile
            except IntegrityError as error:
                notes.append(str(error))
                continue
            return NewestGeneration(generation, because, _free_after(number, numbers), notes)
        return NewestGeneration(None, "", _free_after(0, numbers), notes)

    async def newest_number(self) -> int:
        """Return the newest number, trusted or not; 0 for none. Cheaper than `newest`. Raises: StorageError."""
        return max(await self._numbers(), default=0)

    async def open(self, generation: CacheGeneration) -> LastTree:
        """Open the tree of a generation. Raises: NotFound; IntegrityError; StorageError."""
        where = url_of(self._store, index_path(generation.tree))
        data = await read_index_bytes(self._store, generation.tree, size=generation.index_bytes)
        index = await aio.run_io(decode_index, data, generation.tree, where)
        return LastTree(index, entries_of(index, generation, where), StoreBlocks(self._store, index))

    def put(self, digest: str, data: bytes) -> None:
        """Store a pack; for blocking code, in any thread. Raises: StorageError."""
        self._packs.put(digest, data)

    async def publish(
        self, generation: CacheGeneration, index_bytes: bytes, packs: Sequence[str], key: SigningKey | None
    ) -> None:
        """Publish a generation whose packs are stored already.

        Raises: AlreadyExists if another node has published that number; SourceChanged if packs were removed;
        IntegrityError for fields that no reader would accept; StorageError.
        """
        envelope = seal(encode(generation), PAYLOAD_TYPE, key)
        where = url_of(self._store, name_of(generation.number))
        if len(envelope) > MAX_ENVELOPE_BYTES:
            raise IntegrityError(f"{where}: {len(envelope)} bytes; at most {MAX_ENVELOPE_BYTES}")
        await publish_index(self._store, generation.tree, index_bytes)
        there = {entry.name for entry in await self._store.list("packs")} if packs else set()
        if not there.issuperset(packs):
            raise SourceChanged(f"{where}: packs were removed while publishing; the next capture tries again")
        await self._store.publish(name_of(generation.number), envelope, if_absent=True)
        with suppress(StorageError):  # only readers through a web server need it; the next capture writes it anew
            await self._store.publish(_HINT, msgspec.json.encode(_Hint(generation.number)))

    async def collect_garbage(self, *, grace_s: float = GRACE_S, now_s: float | None = None) -> int:
        """Remove old files of generations before the last ones; return the number of files.

        Files younger than `grace_s`, or of unknown age, stay: a node may be reading them, or writing them for the
        next generation. Raises: StorageError, IntegrityError: then no files of trees are removed.
        """
        now_s = time.time() if now_s is None else now_s
        entries = {number_of(entry.name): entry for entry in await self._store.list("")}
        numbers = sorted(number for number in entries if number is not None)
        trusted = (await self.newest()).generation
        if trusted is None:
            return 0
        numbers = [number for number in numbers if number <= trusted.number]
        kept, going = [], []
        for place, number in enumerate(numbers):
            is_new = place >= len(numbers) - _KEPT
            if is_new or _is_young(entries[numbers[place + 1]], now_s, grace_s):
                kept.append(number)
            else:
                going.append(name_of(number))
        wanted = {name_of(number) for number in kept}
        for number in kept:
            try:
                generation, _ = await self._read(number)
            except Untrusted:
                continue  # no node reads it
            data = await read_index_bytes(self._store, generation.tree, size=generation.index_bytes)
            where = url_of(self._store, index_path(generation.tree))
            index = await aio.run_io(decode_index, data, generation.tree, where)
            wanted |= {index_path(generation.tree), *(index.pack_path(pack) for pack in range(len(index.packs)))}
        for directory in ("index", "packs"):
            for entry in await list_if_there(self._store, directory):
                path = f"{directory}/{entry.name}"
                if is_digest(entry.name) and path not in wanted and not _is_young(entry, now_s, grace_s):
                    going.append(path)
        if (await self.newest()).generation != trusted:
            return 0  # another node has published: the next one collects
        await aio.map_bounded(self._store.delete, going, width=_DELETES_AT_ONCE)
        return len(going)

    # ---- one at a time -------------------------------------------------------------------------------------

    async def _numbers(self) -> set[int]:
        try:
            entries = await list_if_there(self._store, "")
        except StorageTimeout:
            raise  # the store would not answer for the hint either
        except StorageError as refused:
            # A web server does not list. The hint is trusted no more than a name in a list.
            try:
                hint = msgspec.json.decode(await read_small(self._store, _HINT, _MAX_HINT_BYTES), type=_Hint)
            except NotFound:
                return set()
            except (IntegrityError, msgspec.MsgspecError, UnicodeError):
                raise refused from None
            return {hint.number} if 0 < hint.number <= MAX_NUMBER else set()
        found = {number_of(entry.name) for entry in entries if not entry.is_folder}
        return {number for number in found if number}

    async def _read(self, number: int) -> tuple[CacheGeneration, str]:
        trusted = await self._trust.fetch(self._store, name_of(number), PAYLOAD_TYPE, max_bytes=MAX_ENVELOPE_BYTES)
        where = url_of(self._store, name_of(number))
        return await aio.run_io(decode, trusted.payload, where, self._key, number), trusted.because


def _free_after(number: int, taken: set[int]) -> int:
    """Return the first free number after `number`: untrusted files keep their names."""
    number += 1
    while number in taken:
        number += 1
    return number


def _is_young(entry: Entry, now_s: float, grace_s: float) -> bool:
    """Return whether an entry is younger than `grace_s`, or of unknown age."""
    return not entry.mtime_s or now_s - entry.mtime_s < grace_s
