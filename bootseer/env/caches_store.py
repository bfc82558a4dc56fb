"""First-step caches in a store: the newest generation that is believed, the next one, and what may go.

    caches/KEY/cache-000007.json   signed as trees are; created if absent; with it the generation exists
    caches/KEY/newest.json         a hint for stores that cannot list; nobody's word for anything
    caches/KEY/index/, packs/      the trees of all generations, by content: equal packs are there once
    caches/KEY/keys/KEY/lease-*    whose turn it is to publish (caches_turn.py)

These files are code that ranks will run: nothing is read but what `Trust` believes, of the key that was asked for.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.env.caches_document import (
    MOST_ENVELOPE_BYTES,
    MOST_NUMBER,
    PAYLOAD_TYPE,
    Generation,
    decode,
    encode,
    name_of,
    number_of,
)
from bootseer.env.caches_tree import LastTree, entries_of
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
from bootseer.storage.near import near_folder_of
from bootseer.storage.paths import is_chained
from bootseer.tree.head import is_digest
from bootseer.tree.index import decode as decode_index
from bootseer.tree.index import index_path
from bootseer.tree.opening import publish_index, read_index_bytes
from bootseer.tree.pack_folder import PackFolder
from bootseer.tree.reading import StoreBlocks
from bootseer.trust import SigningKey, Trust, seal
from bootseer.trust.reading import place_of, read_whole

FOLDER = "caches"
GRACE_S = 3600.0  # what a generation had stays so long after the next one came
_HINT = "newest.json"
_MOST_TRIED = 8  # files that are not believed, before the next lower one is not looked at any more
_KEPT = 2
_MOST_HINT_BYTES = 4096
_DELETES_AT_ONCE = 8


class Newest(NamedTuple):
    """What is in the store."""

    generation: Generation | None
    because: str  # why it is believed
    next: int  # the number of the next one
    notes: list[str]  # what is there and is not believed


class _Hint(msgspec.Struct):
    number: int


def open_caches(url: str, key: str, peers: str = "") -> Store:
    """The store of one key's caches below an environment store. To be called on aio's loop.

    Args: peers: path of the file of the job's peers, who are asked for packs before it; then it is only read.
    Raises: ConfigError.
    """
    found = url_of(url, key)
    if not peers or near_folder_of(found):
        return open_store(found)
    from bootseer.peers import open_peer_store

    return open_peer_store(found, peers)


def url_of(url: str, key: str) -> str:
    """Of the store of one key's caches. Raises: ConfigError."""
    if not is_digest(key):
        raise ConfigError(f"{key[:80]!r} is no key of caches: 64 hex digits")
    return _below(url, f"{FOLDER}/{key}")


def _below(url: str, folder: str) -> str:
    if is_chained(url):
        first, mark, rest = url.partition("::")
        if "://" not in first:
            raise ConfigError(f"{url}: name a folder in it")
        return f"{first.rstrip('/')}/{folder}{mark}{rest}"
    head, mark, query = url.partition("?") if url.startswith(("http://", "https://")) else (url, "", "")
    return f"{head.rstrip('/')}/{folder}{mark}{query}"


class CacheStore:
    """The caches of one key. `store` has them in its root."""

    def __init__(self, store: Store, key: str, trust: Trust) -> None:
        self._store = store
        self._packs = PackFolder(store)
        self._key = key
        self._trust = trust

    async def newest(self) -> Newest:
        """The newest generation that is believed. Raises: StorageError."""
        numbers = await self._numbers()
        notes: list[str] = []
        for number in sorted(numbers, reverse=True)[:_MOST_TRIED]:
            try:
                generation, because = await self._read(number)
            except NotFound:
                continue  # taken away meanwhile
            except IntegrityError as error:
                notes.append(str(error))
                continue
            return Newest(generation, because, _free_after(number, numbers), notes)
        return Newest(None, "", _free_after(0, numbers), notes)

    async def newest_number(self) -> int:
        """Of what is there, believed or not; 0 for nothing. Cheaper than `newest`. Raises: StorageError."""
        return max(await self._numbers(), default=0)

    async def open(self, generation: Generation) -> LastTree:
        """Its tree. Raises: NotFound; IntegrityError; StorageError."""
        where = place_of(self._store, index_path(generation.tree))
        data = await read_index_bytes(self._store, generation.tree, size=generation.index_bytes)
        index = await aio.run_io(decode_index, data, generation.tree, where)
        return LastTree(index, entries_of(index, generation, where), StoreBlocks(self._store, index))

    def put(self, digest: str, data: bytes) -> None:
        """Stores a pack; for plain code, in any thread. Raises: StorageError."""
        self._packs.put(digest, data)

    async def publish(
        self, generation: Generation, index_bytes: bytes, packs: Sequence[str], key: SigningKey | None
    ) -> None:
        """Makes a generation whose packs are there already.

        Raises: AlreadyExists when another node has made that one; SourceChanged when packs were taken away;
        IntegrityError for what no reader would take; StorageError.
        """
        envelope = seal(encode(generation), PAYLOAD_TYPE, key)
        where = place_of(self._store, name_of(generation.number))
        if len(envelope) > MOST_ENVELOPE_BYTES:
            raise IntegrityError(f"{where}: {len(envelope)} bytes; at most {MOST_ENVELOPE_BYTES}")
        await publish_index(self._store, generation.tree, index_bytes)
        there = {entry.name for entry in await self._store.list("packs")} if packs else set()
        if not there.issuperset(packs):
            raise SourceChanged(f"{where}: packs were taken away while it was made: the next capture tries again")
        await self._store.publish(name_of(generation.number), envelope, if_absent=True)
        await self._store.publish(_HINT, msgspec.json.encode(_Hint(generation.number)))

    async def collect_garbage(self, *, grace_s: float = GRACE_S, now_s: float | None = None) -> int:
        """Takes away what generations before the last ones had, long enough after; gives how many files.

        What is younger than `grace_s`, or of an age that the store does not tell, stays: a node may be reading it,
        or writing it for a generation to come.
        Raises: StorageError, IntegrityError: then nothing of the trees is taken away.
        """
        now_s = time.time() if now_s is None else now_s
        entries = {number_of(entry.name): entry for entry in await self._store.list("")}
        numbers = sorted(number for number in entries if number is not None)
        believed = (await self.newest()).generation
        if believed is None:
            return 0
        numbers = [number for number in numbers if number <= believed.number]
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
                continue  # nobody reads it
            data = await read_index_bytes(self._store, generation.tree, size=generation.index_bytes)
            where = place_of(self._store, index_path(generation.tree))
            index = await aio.run_io(decode_index, data, generation.tree, where)
            wanted |= {index_path(generation.tree), *(index.pack_path(pack) for pack in range(len(index.packs)))}
        for folder in ("index", "packs"):
            for entry in await self._list(folder):
                path = f"{folder}/{entry.name}"
                if is_digest(entry.name) and path not in wanted and not _is_young(entry, now_s, grace_s):
                    going.append(path)
        if (await self.newest()).generation != believed:
            return 0  # somebody publishes: the next one does this as well
        await aio.map_bounded(self._store.delete, going, width=_DELETES_AT_ONCE)
        return len(going)

    # ---- one at a time -------------------------------------------------------------------------------------

    async def _numbers(self) -> set[int]:
        try:
            entries = await self._list("")
        except StorageTimeout:
            raise  # nor would it answer for the hint
        except StorageError as refused:
            # A web server does not list. What the hint says is believed no more than a name in a list.
            try:
                hint = msgspec.json.decode(await read_whole(self._store, _HINT, _MOST_HINT_BYTES), type=_Hint)
            except NotFound:
                return set()
            except (IntegrityError, msgspec.MsgspecError, UnicodeError):
                raise refused from None
            return {hint.number} if 0 < hint.number <= MOST_NUMBER else set()
        found = {number_of(entry.name) for entry in entries if not entry.is_folder}
        return {number for number in found if number}

    async def _list(self, folder: str) -> list[Entry]:
        try:
            return await self._store.list(folder)
        except NotFound:
            return []

    async def _read(self, number: int) -> tuple[Generation, str]:
        believed = await self._trust.fetch(
            self._store, name_of(number), PAYLOAD_TYPE, most_bytes=MOST_ENVELOPE_BYTES
        )
        where = place_of(self._store, name_of(number))
        return await aio.run_io(decode, believed.payload, where, self._key, number), believed.because


def _free_after(number: int, taken: set[int]) -> int:
    """What is there and is not believed has a name that cannot be had."""
    number += 1
    while number in taken:
        number += 1
    return number


def _is_young(entry: Entry, now_s: float, grace_s: float) -> bool:
    """Where the age is not known, it is."""
    return not entry.mtime_s or now_s - entry.mtime_s < grace_s
