"""The environment store: a snapshot for each key, signed, found by whoever asks for the key, made by one.

In: a store, who is believed, keys. Out: snapshots that are believed, and their trees. With env-NNNNNN.json one
exists; everything that it needs was written before. What cannot be used is passed over, and `say` is told why;
only a store that fails is an error.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.env.admissible import why_no_environment
from bootseer.env.collecting import Collected, collect
from bootseer.env.gc import Limits
from bootseer.env.held_lease import WRITING, Pause, pause_until
from bootseer.env.layout import (
    DOCUMENT,
    KEYS,
    USED,
    below,
    check_key,
    document_path,
    env_path,
    generation_of,
    is_key,
    key_folder,
    reads_folder,
    tree_folder,
    used_path,
)
from bootseer.env.lease import BEAT_S, Cannot
from bootseer.env.links import refuse_links
from bootseer.env.reads_store import MOST_LOOKED_AT, PUBLISH_TRIES, StoredReads, is_web, probe
from bootseer.env.snapshot import MOST_ENVELOPE_BYTES, PAYLOAD_TYPE, Snapshot, decode, encode, is_expired
from bootseer.errors import AlreadyExists, BootseerError, IntegrityError, NotFound, StorageError, Untrusted
from bootseer.storage import Entry, Store
from bootseer.storage.below import Below
from bootseer.storage.near import folder_of
from bootseer.tree import index as indexes
from bootseer.tree.block_codec import Codec
from bootseer.tree.head import split_pin
from bootseer.tree.index import PACKS, Index, digest_of, index_path
from bootseer.tree.opening import Cached, publish_index, read_index_bytes
from bootseer.tree.pack_folder import PackFolder
from bootseer.tree.reading import StoreBlocks
from bootseer.tree.verifying import Progress, Verified, verify_blocks
from bootseer.trust import SigningKey, Trust, seal
from bootseer.trust.owners import why_not_owned
from bootseer.trust.reading import place_of, read_whole
from bootseer.trust.trust import ADD, MAKE

MOST_DOCUMENT_BYTES = 1 << 20
USED_EVERY_S = 3600.0  # a stamp is not touched more often
LIST_AT_ONCE = 8

Say = Callable[[str], object]  # a line for people


class Found(NamedTuple):
    """A snapshot that is believed and not expired."""

    snapshot: Snapshot
    because: str  # why it is believed
    generation: int
    used_s: float  # when its stamp was touched last, since the epoch; 0 if that is not known


class Published(NamedTuple):
    """What counts from now on."""

    found: Found
    is_ours: bool  # False: somebody else was first, and theirs counts


class Opened(msgspec.Struct, frozen=True):
    """The tree of a snapshot, for restoring."""

    index: Index
    index_bytes: bytes  # as stored: for a cache
    digest: str
    store: Store  # whose root is the tree's folder
    blocks: StoreBlocks  # on aio's background loop
    url: str  # of the tree, with its digest: for other processes


class StoredDocument(NamedTuple):
    """key.json: its SHA-256 is the key."""

    key: str
    data: bytes
    made_s: float  # since the epoch; 0 if that is not known


class Listed(NamedTuple):
    """A key and what there is of it."""

    key: str
    found: Found | None  # None: nothing that a start would use now
    refused: list[str]  # why what is there is not used
    stored_bytes: int  # of its tree


class EnvStore:
    """For one event loop.

    Args:
        url: as the user wrote it: for messages and for other processes.
        say: gets a line about everything that is not used.
    """

    def __init__(self, store: Store, url: str, trust: Trust, *, say: Say = lambda _: None) -> None:
        self.store, self.url, self.trust = store, url, trust
        self.reads = StoredReads(store, trust, say)  # what set-ups have read
        self._say = say

    # ---- finding -------------------------------------------------------------------------------------------

    async def find(self, key: str, now_s: float, refused: Say | None = None) -> Found | None:
        """The highest generation that is believed and not expired at `now_s` (since the epoch).

        Args: refused: gets a line about each that is passed over, by default as `say` does.
        Raises: StorageError when the store cannot be read; ConfigError for what is no key.
        """
        return await self._find(key, now_s, refused or self._say)

    async def touch(self, found: Found, now_s: float, guess: str = "") -> None:
        """Notes that it is used, at most hourly; a store that fails, or is only read, does not matter.

        Args: guess: the key of the first guess.
        """
        key = found.snapshot.key
        if now_s - found.used_s < USED_EVERY_S or is_web(self.store):
            return
        try:
            await refuse_links(self.store, key_folder(key))
            await self.store.publish(used_path(key), b"%d\n" % int(now_s))
            await self.reads.touch(guess, now_s)
        except BootseerError:
            pass

    async def open(self, snapshot: Snapshot, *, cached: Cached | None = None) -> Opened:
        """The tree of a snapshot that was found; its index is verified, each block is when it is read.

        `cached` gives the index object of a digest, or None; it is called in a thread and not trusted.
        Raises: NotFound when it was taken away; IntegrityError; Untrusted; StorageError.
        """
        folder = tree_folder(snapshot.key)
        place = Below(self.store, folder)
        data = None if cached is None else await aio.run_io(cached, snapshot.tree)
        if data is None or digest_of(data) != snapshot.tree:
            await refuse_links(self.store, f"{folder}/{index_path(snapshot.tree)}", f"{folder}/{PACKS}")
            data = await read_index_bytes(place, snapshot.tree, size=snapshot.index_bytes)
        index = await aio.run_io(_decode, data, snapshot, place_of(place, index_path(snapshot.tree)))
        return Opened(index, data, snapshot.tree, place, StoreBlocks(place, index), self.tree_url(snapshot))

    def tree_url(self, snapshot: Snapshot) -> str:
        """Where other processes find the tree, which need no key: the URL ends in its digest."""
        return f"{below(split_pin(self.url)[0], tree_folder(snapshot.key))}@sha256:{snapshot.tree}"

    # ---- publishing ----------------------------------------------------------------------------------------

    @property
    def codec(self) -> Codec:
        """Of the blocks of a tree for this store: links to stores that are far are slower than a core unpacks."""
        return "lz4" if folder_of(self.url) else "zstd"

    def packs(self, key: str) -> PackFolder:
        """Takes the packs of a tree that is being built; `prepare` was asked before."""
        return PackFolder(Below(self.store, tree_folder(key)))

    async def prepare(self, key: str, document: bytes, signing: SigningKey | None) -> Cannot | None:
        """Before a tree is built: why it could not be published, or would be believed by nobody; else None.

        Writes key.json. `document`: the key document; its SHA-256 is the key.
        Raises: IntegrityError for another document; Untrusted for links in the store; StorageError.
        """
        return await self._prepare(key, document, signing, key_folder(key))

    async def prepare_reads(self, guess: str, document: bytes, signing: SigningKey | None) -> Cannot | None:
        """The same before set-up has run, when its key is not known yet. Args: document: of the first guess."""
        return await self._prepare(guess, document, signing, reads_folder(guess))

    async def _prepare(self, key: str, document: bytes, signing: SigningKey | None, place: str) -> Cannot | None:
        path = f"{place}/{DOCUMENT}"
        if len(document) > MOST_DOCUMENT_BYTES or hashlib.sha256(document).hexdigest() != check_key(key):
            raise IntegrityError(f"{place_of(self.store, path)}: this document is not that of the key")
        if not self.store.features.creates_if_absent:
            return Cannot(
                f"{self.store.url}: this store cannot create a file exactly once, so nothing is published there:"
                " every node installs for itself"
            )
        folder = tree_folder(key)
        await refuse_links(self.store, place, f"{folder}/{PACKS}", f"{folder}/index")
        await self._publish_document(path, document)
        is_trusted = signing is not None and any(each.key.raw == signing.public for each in self.trust.trusted)
        reason = "" if is_trusted else await why_not_owned(self.store, path, document)
        if not reason:
            return None
        what = "there is no key to sign with" if signing is None else "the key that signs is not trusted here"
        return Cannot(
            f"{self.store.url}: nothing is published there, as the next start would not believe it: {what}, and"
            f" {reason}; {MAKE if signing is None else ADD}"
        )

    async def publish(
        self,
        snapshot: Snapshot,
        document: bytes,
        index_bytes: bytes,
        signing: SigningKey | None,
        *,
        replaces: int = 0,
    ) -> Published | Cannot:
        """Makes a snapshot whose packs are there: index, key.json, then env-NNNNNN.json, created if absent.

        Args: replaces: the generation that is to be replaced although it is good; every later one counts instead
            of ours, as somebody else made it meanwhile.
        Raises: IntegrityError for what no reader would take; SourceChanged when packs are gone; StorageError.
        """
        key = snapshot.key
        payload = encode(snapshot)
        where = place_of(self.store, key_folder(key))
        index = await aio.run_io(_decode, index_bytes, snapshot, where)
        cannot = await self.prepare(key, document, signing)
        if cannot is not None:
            return cannot
        envelope = seal(payload, PAYLOAD_TYPE, signing)
        if len(envelope) > MOST_ENVELOPE_BYTES:
            raise IntegrityError(f"{where}: {len(envelope)} bytes; at most {MOST_ENVELOPE_BYTES}")
        await self.packs(key).check(index.packs)
        await publish_index(Below(self.store, tree_folder(key)), snapshot.tree, index_bytes)
        for _ in range(PUBLISH_TRIES):
            numbers, _ = await self._generations(key)
            theirs = await self._find(key, snapshot.created_s, self._say)
            if theirs is not None and theirs.generation > replaces:
                return Published(theirs, theirs.snapshot == snapshot)
            path = env_path(key, numbers[0] + 1 if numbers else 1)

            async def create(_: int, path: str = path) -> None:
                await self.store.publish(path, envelope, if_absent=True)

            try:
                await aio.retry(WRITING, create)
            except AlreadyExists:
                continue  # somebody else's, or ours, whose answer was lost
            ours = await self._find(key, snapshot.created_s, self._say)
            if ours is None:
                raise Untrusted(f"{place_of(self.store, path)}: was published, and is not believed here")
            return Published(ours, ours.snapshot == snapshot)
        raise StorageError(f"{where}: others publish faster than it can be read")

    # ---- looking -------------------------------------------------------------------------------------------

    async def documents(self, limit: int) -> list[StoredDocument]:
        """Key documents, the newest first as far as the store tells; those that are not of their key are left out.

        Raises: StorageError.
        """
        keys = sorted(await self.keys(), key=lambda entry: -entry.mtime_s)

        async def read(entry: Entry) -> StoredDocument | None:
            path = document_path(entry.name)
            try:
                await refuse_links(self.store, path)
                data = await read_whole(self.store, path, MOST_DOCUMENT_BYTES)
            except (NotFound, IntegrityError):
                return None
            if hashlib.sha256(data).hexdigest() != entry.name:
                self._say(f"warning: {place_of(self.store, path)}: is not the document of this key: not used")
                return None
            return StoredDocument(entry.name, data, entry.mtime_s)

        found = await aio.map_bounded(read, keys[:limit], width=LIST_AT_ONCE)
        return [each for each in found if each is not None]

    async def verify(self, found: Found, progress: Progress = lambda _, __: None) -> Verified:
        """Reads every block of a snapshot's tree. Raises: as `open`."""
        opened = await self.open(found.snapshot)
        return await verify_blocks(opened.store, opened.index, progress)

    async def gc(
        self,
        max_bytes: int | None,
        max_age_s: float | None,
        now_s: float,
        *,
        is_dry: bool = False,
        beat_s: float = BEAT_S,
        pause: Pause = pause_until,
    ) -> Collected:
        """Deletes what is expired, unused for `max_age_s`, beyond `max_bytes`, or of builds that never ended.

        Raises: as bootseer.env.collecting.collect.
        """
        return await collect(
            self.store,
            Limits(max_bytes, max_age_s),
            now_s,
            is_dry=is_dry,
            beat_s=beat_s,
            pause=pause,
            say=self._say,
        )

    async def keys(self) -> list[Entry]:
        """Folders of keys. Raises: StorageError."""
        await refuse_links(self.store, KEYS)
        try:
            entries = await self.store.list(KEYS)
        except NotFound:
            return []
        return [entry for entry in entries if entry.is_folder and is_key(entry.name)]

    async def stored_bytes(self, key: str) -> int:
        """Of the packs of a key's trees. Raises: StorageError."""
        folder = f"{tree_folder(key)}/{PACKS}"
        await refuse_links(self.store, folder)
        try:
            return sum(entry.size for entry in await self.store.list(folder))
        except NotFound:
            return 0

    async def read(self, key: str, number: int) -> tuple[Snapshot, str]:
        """What a generation says, and why it is believed.

        Raises: Untrusted; IntegrityError, also for the snapshot of another key; NotFound; StorageError.
        """
        path = env_path(key, number)
        await refuse_links(self.store, path)
        believed = await self.trust.fetch(self.store, path, PAYLOAD_TYPE, most_bytes=MOST_ENVELOPE_BYTES)
        where = place_of(self.store, path)
        snapshot = decode(believed.payload, where)
        if snapshot.key != key:
            raise Untrusted(f"{where}: is the snapshot of another key, {snapshot.key}: delete it")
        return snapshot, believed.because

    # ---- inside --------------------------------------------------------------------------------------------

    async def _find(self, key: str, now_s: float, say: Say) -> Found | None:
        try:
            numbers, used_s = await self._generations(key)
        except Untrusted as error:
            say(str(error))
            return None
        for number in numbers[:MOST_LOOKED_AT]:
            try:
                snapshot, because = await self.read(key, number)
            except IntegrityError as error:
                say(str(error))
                continue
            except NotFound:
                continue  # collected meanwhile
            except StorageError as error:
                if error.retryable:
                    raise
                say(str(error))  # it is no file, or one that this user may not read
                continue
            if not is_expired(snapshot, now_s):
                return Found(snapshot, because, number, used_s)
        return None

    async def _generations(self, key: str) -> tuple[list[int], float]:
        """Numbers, the highest first, and when the key's stamp was touched."""
        if is_web(self.store):
            return await probe(self.store, lambda number: env_path(key, number)), 0.0
        await refuse_links(self.store, key_folder(key))
        try:
            entries = await self.store.list(key_folder(key))
        except NotFound:
            return [], 0.0
        used_s = max((entry.mtime_s for entry in entries if entry.name == USED), default=0.0)
        return sorted((number for entry in entries if (number := generation_of(entry.name))), reverse=True), used_s

    async def _publish_document(self, path: str, document: bytes) -> None:
        try:
            await self.store.publish(path, document, if_absent=True)
        except AlreadyExists:
            try:
                is_same = await read_whole(self.store, path, MOST_DOCUMENT_BYTES) == document
            except (NotFound, IntegrityError):
                is_same = False
            if not is_same:
                await self.store.publish(path, document)

    async def _has_document(self, key: str) -> bool:
        try:
            await self.store.stat(document_path(key))
        except NotFound:
            return False
        return True

    # ---- everything (last, as its name hides the type) --------------------------------------------------------

    async def list(self, now_s: float) -> list[Listed]:
        """Every key. Raises: StorageError."""

        async def look(entry: Entry) -> Listed | None:
            refused: list[str] = []
            try:
                found = await self._find(entry.name, now_s, refused.append)
                stored_bytes = await self.stored_bytes(entry.name)
                if found is None and not refused and not await self._has_document(entry.name):
                    return None  # somebody has begun to build there, and what came of it has another key
            except Untrusted as error:
                return Listed(entry.name, None, [str(error)], 0)
            return Listed(entry.name, found, refused, stored_bytes)

        listed = await aio.map_bounded(look, await self.keys(), width=LIST_AT_ONCE)
        return [each for each in listed if each is not None]


def _decode(data: bytes, snapshot: Snapshot, where: str) -> Index:
    """The index of a snapshot's tree, if that can be an environment."""
    index = indexes.decode(data, snapshot.tree, where)
    reason = why_no_environment(index, len(snapshot.targets))
    if reason:
        raise IntegrityError(f"{where}: {reason}")
    return index
