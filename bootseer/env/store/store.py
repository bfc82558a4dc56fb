"""The environment store: a signed snapshot for each key, made once and used by any node with the same key.

In: a store, the trusted signers, keys. Out: trusted snapshots and their trees. Writing env-NNNNNN.json completes a
snapshot; all its data are written before. Unusable snapshots are skipped, and the reason is logged. Only a
failing store is an error.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.env.store.admissible import find_tree_fault
from bootseer.env.store.collecting import GcResult, collect
from bootseer.env.store.gc import Limits
from bootseer.env.store.held_lease import WRITING, Pause, pause_until
from bootseer.env.store.lease import HEARTBEAT_S, LeaseUnavailable
from bootseer.env.store.links import refuse_links
from bootseer.env.store.reads_store import MAX_EXAMINED, PUBLISH_TRIES, Refused, StoredReads, probe
from bootseer.env.store.snapshot import MAX_ENVELOPE_BYTES, PAYLOAD_TYPE, Snapshot, decode, encode, is_expired
from bootseer.env.store_layout import (
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
    reads_directory,
    tree_directory,
    tree_used_directory,
    tree_used_path,
    used_path,
)
from bootseer.errors import AlreadyExists, BootseerError, IntegrityError, NotFound, StorageError, Untrusted
from bootseer.logs import get_logger
from bootseer.storage import Entry, Store
from bootseer.storage.below import SubdirectoryStore
from bootseer.storage.local_stores import directory_of
from bootseer.storage.paths import is_web
from bootseer.storage.small_files import list_if_there, read_small, url_of
from bootseer.tree import index as indexes
from bootseer.tree.block_codec import Codec
from bootseer.tree.head import split_pin
from bootseer.tree.index import PACKS, Index, digest_of, index_path
from bootseer.tree.opening import Cached, publish_index, read_index_bytes
from bootseer.tree.pack_folder import PackWriter
from bootseer.tree.reading import StoreBlocks
from bootseer.tree.verifying import Progress, VerificationResult, verify_blocks
from bootseer.trust import SigningKey, Trust, seal
from bootseer.trust.owners import why_not_trusted_owner
from bootseer.trust.trust import ADD, MAKE

_log = get_logger(__name__)

MAX_DOCUMENT_BYTES = 1 << 20
USED_EVERY_S = 3600.0  # minimum interval between touches of a stamp
HELD_S = USED_EVERY_S / 2  # a stamp of this age is new enough for a job that looks at it again within an hour
LIST_AT_ONCE = 8


class FoundSnapshot(NamedTuple):
    """A snapshot that is trusted and not expired."""

    snapshot: Snapshot
    because: str  # why it is trusted
    generation: int
    used_s: float  # last touch of its stamp, since the epoch; 0 if unknown


class PublishedSnapshot(NamedTuple):
    """The snapshot that is in use after publishing."""

    found: FoundSnapshot
    is_ours: bool  # False: another builder was first, and its snapshot is used


class OpenedTree(msgspec.Struct, frozen=True):
    """The tree of a snapshot, for restoring."""

    index: Index
    index_bytes: bytes  # as stored; for a cache
    digest: str
    store: Store  # its root is the tree's directory
    blocks: StoreBlocks  # on aio's background loop
    url: str  # of the tree, with its digest; for other processes


class StoredDocument(NamedTuple):
    """A key.json; its SHA-256 is the key."""

    key: str
    data: bytes
    made_s: float  # since the epoch; 0 if unknown


class ListedKey(NamedTuple):
    key: str
    found: FoundSnapshot | None  # None: no usable snapshot
    refused: list[str]  # why snapshots are not used
    stored_bytes: int  # size of its tree


class EnvStore:
    """A store of environments, for one event loop.

    Args:
        url: as the user wrote it; for messages and for other processes.
    """

    def __init__(self, store: Store, url: str, trust: Trust) -> None:
        self.store, self.url, self.trust = store, url, trust
        self.reads = StoredReads(store, trust)  # lists of reads

    # ---- lookup --------------------------------------------------------------------------------------------

    async def find(self, key: str, now_s: float, refused: Refused | None = None) -> FoundSnapshot | None:
        """Return the highest generation that is trusted and not expired at `now_s` (since the epoch).

        Args: refused: receives a line about each snapshot that is skipped (default: it is logged).
        Raises: StorageError if the store cannot be read; ConfigError for an invalid key.
        """
        return await self._find(key, now_s, refused or _log.info)

    async def touch(self, found: FoundSnapshot, now_s: float, guess: str = "") -> None:
        """Record use, at most hourly; failures and read-only stores are ignored.

        Args: guess: the key of the first guess.
        """
        key = found.snapshot.key
        if now_s - found.used_s < USED_EVERY_S or is_web(self.store.url):
            return
        try:
            await refuse_links(self.store, key_folder(key))
            await self.store.publish(used_path(key), b"%d\n" % int(now_s))
            await self.reads.touch(guess, now_s)
        except BootseerError:
            pass

    async def hold(self, found: FoundSnapshot, now_s: float, guess: str = "") -> None:
        """Record that a job has a tree mounted, unless another node has just done so. Call it at least hourly.

        Args: guess: the key of the first guess. Raises: StorageError, IntegrityError.
        """
        key, tree = found.snapshot.key, found.snapshot.tree
        if is_web(self.store.url):
            return
        await refuse_links(self.store, key_folder(key), tree_used_directory(key))
        numbers, _ = await self._generations(key)
        if found.generation not in numbers:
            return  # the user has deleted it, by force
        entries = await list_if_there(self.store, tree_used_directory(key))
        held_s = max((entry.mtime_s for entry in entries if entry.name == tree), default=0.0)
        if not 0 <= now_s - held_s < HELD_S:
            await self.store.publish(tree_used_path(key, tree), b"%d\n" % int(now_s))
            await self.touch(found._replace(used_s=0.0), now_s, guess)

    async def open(self, snapshot: Snapshot, *, cached: Cached | None = None) -> OpenedTree:
        """Open the tree of a snapshot; verifies its index now and each block when it is read.

        Args: cached: returns the index object of a digest, or None; called in a thread and not trusted.
        Raises: NotFound if it was removed; IntegrityError; Untrusted; StorageError.
        """
        directory = tree_directory(snapshot.key)
        place = SubdirectoryStore(self.store, directory)
        data = None if cached is None else await aio.run_io(cached, snapshot.tree)
        if data is None or digest_of(data) != snapshot.tree:
            await refuse_links(self.store, f"{directory}/{index_path(snapshot.tree)}", f"{directory}/{PACKS}")
            data = await read_index_bytes(place, snapshot.tree, size=snapshot.index_bytes)
        index = await aio.run_io(_decode, data, snapshot, url_of(place, index_path(snapshot.tree)))
        return OpenedTree(index, data, snapshot.tree, place, StoreBlocks(place, index), self.tree_url(snapshot))

    def tree_url(self, snapshot: Snapshot) -> str:
        """Return the URL of the tree for other processes, which need no key, as the URL ends in its digest."""
        return f"{below(split_pin(self.url)[0], tree_directory(snapshot.key))}@sha256:{snapshot.tree}"

    # ---- publishing ----------------------------------------------------------------------------------------

    @property
    def codec(self) -> Codec:
        """The codec of a tree's blocks: links to remote stores are slower than decompression."""
        return "lz4" if directory_of(self.url) else "zstd"

    def packs(self, key: str) -> PackWriter:
        """Return a writer for the packs of a new tree; call `prepare` before."""
        return PackWriter(SubdirectoryStore(self.store, tree_directory(key)))

    async def prepare(self, key: str, document: bytes, signing: SigningKey | None) -> LeaseUnavailable | None:
        """Write key.json before a tree is built. Return why it could not be published or trusted; else None.

        Args: document: the key document; its SHA-256 is the key.
        Raises: IntegrityError for another document; Untrusted for links in the store; StorageError.
        """
        return await self._prepare(key, document, signing, key_folder(key))

    async def prepare_reads(
        self, guess: str, document: bytes, signing: SigningKey | None
    ) -> LeaseUnavailable | None:
        """Prepare before set-up, while its key is unknown. Args: document: of the first guess."""
        return await self._prepare(guess, document, signing, reads_directory(guess))

    async def _prepare(
        self, key: str, document: bytes, signing: SigningKey | None, place: str
    ) -> LeaseUnavailable | None:
        path = f"{place}/{DOCUMENT}"
        if len(document) > MAX_DOCUMENT_BYTES or hashlib.sha256(document).hexdigest() != check_key(key):
            raise IntegrityError(f"{url_of(self.store, path)}: the document does not match the key")
        if not self.store.features.creates_if_absent:
            return LeaseUnavailable(
                f"{self.store.url}: publishing disabled: this store cannot create a file exactly once;"
                " each node installs on its own"
            )
        directory = tree_directory(key)
        await refuse_links(self.store, place, f"{directory}/{PACKS}", f"{directory}/index")
        await self._publish_document(path, document)
        is_trusted = signing is not None and any(each.key.raw == signing.public for each in self.trust.trusted)
        reason = "" if is_trusted else await why_not_trusted_owner(self.store, path, document)
        if not reason:
            return None
        what = "there is no key to sign with" if signing is None else "the key that signs is not trusted here"
        return LeaseUnavailable(
            f"{self.store.url}: publishing disabled: the next start would not trust it: {what}, and"
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
    ) -> PublishedSnapshot | LeaseUnavailable:
        """Publish a snapshot after its packs: index, key.json, then env-NNNNNN.json, which must be new.

        Args: replaces: the generation to replace although it is valid; a later one of another builder is used
            instead.
        Raises: IntegrityError if no reader would accept it; SourceChanged if packs are missing; StorageError.
        """
        key = snapshot.key
        payload = encode(snapshot)
        where = url_of(self.store, key_folder(key))
        index = await aio.run_io(_decode, index_bytes, snapshot, where)
        cannot = await self.prepare(key, document, signing)
        if cannot is not None:
            return cannot
        envelope = seal(payload, PAYLOAD_TYPE, signing)
        if len(envelope) > MAX_ENVELOPE_BYTES:
            raise IntegrityError(f"{where}: {len(envelope)} bytes; at most {MAX_ENVELOPE_BYTES}")
        await self.packs(key).check(index.packs)
        await publish_index(SubdirectoryStore(self.store, tree_directory(key)), snapshot.tree, index_bytes)
        for _ in range(PUBLISH_TRIES):
            numbers, _ = await self._generations(key)
            theirs = await self._find(key, snapshot.created_s, _log.info)
            if theirs is not None and theirs.generation > replaces:
                return PublishedSnapshot(theirs, theirs.snapshot == snapshot)
            path = env_path(key, numbers[0] + 1 if numbers else 1)

            async def create(_: int, path: str = path) -> None:
                await self.store.publish(path, envelope, if_absent=True)

            try:
                await aio.retry(WRITING, create)
            except AlreadyExists:
                continue  # by another builder, or by this one if its answer was lost
            ours = await self._find(key, snapshot.created_s, _log.info)
            if ours is None:
                raise Untrusted(f"{url_of(self.store, path)}: was published, but is not trusted on this node")
            return PublishedSnapshot(ours, ours.snapshot == snapshot)
        raise StorageError(f"{where}: other builders publish faster than this node can read")

    # ---- reading and verification --------------------------------------------------------------------------

    async def documents(self, limit: int) -> list[StoredDocument]:
        """Return key documents, the newest first if the store has times; skip those that do not match their key.

        Raises: StorageError.
        """
        keys = sorted(await self.keys(), key=lambda entry: -entry.mtime_s)

        async def read(entry: Entry) -> StoredDocument | None:
            path = document_path(entry.name)
            try:
                await refuse_links(self.store, path)
                data = await read_small(self.store, path, MAX_DOCUMENT_BYTES)
            except (NotFound, IntegrityError):
                return None
            if hashlib.sha256(data).hexdigest() != entry.name:
                _log.warning("%s: is not the document of this key; not used", url_of(self.store, path))
                return None
            return StoredDocument(entry.name, data, entry.mtime_s)

        found = await aio.map_bounded(read, keys[:limit], width=LIST_AT_ONCE)
        return [each for each in found if each is not None]

    async def verify(self, found: FoundSnapshot, progress: Progress = lambda _, __: None) -> VerificationResult:
        """Verify every block of a snapshot's tree. Raises: as `open`."""
        opened = await self.open(found.snapshot)
        return await verify_blocks(opened.store, opened.index, progress)

    async def gc(
        self,
        max_bytes: int | None,
        max_age_s: float | None,
        now_s: float,
        *,
        takes_recent: bool = False,
        is_dry: bool = False,
        beat_s: float = HEARTBEAT_S,
        pause: Pause = pause_until,
    ) -> GcResult:
        """Delete snapshots that are expired, unused for `max_age_s` or beyond `max_bytes`, and abandoned builds.

        Args: takes_recent: also what jobs use, or used within two hours.
        Raises: as bootseer.env.store.collecting.collect.
        """
        return await collect(
            self.store,
            Limits(max_bytes, max_age_s, takes_recent),
            now_s,
            is_dry=is_dry,
            beat_s=beat_s,
            pause=pause,
        )

    async def keys(self) -> list[Entry]:
        """Return the directories of keys. Raises: StorageError."""
        await refuse_links(self.store, KEYS)
        return [entry for entry in await list_if_there(self.store, KEYS) if entry.is_folder and is_key(entry.name)]

    async def stored_bytes(self, key: str) -> int:
        """Return the size of the packs of a key's trees. Raises: StorageError."""
        directory = f"{tree_directory(key)}/{PACKS}"
        await refuse_links(self.store, directory)
        return sum(entry.size for entry in await list_if_there(self.store, directory))

    async def read(self, key: str, number: int) -> tuple[Snapshot, str]:
        """Return the snapshot of a generation, and why it is trusted.

        Raises: Untrusted; IntegrityError, also for the snapshot of another key; NotFound; StorageError.
        """
        path = env_path(key, number)
        await refuse_links(self.store, path)
        trusted = await self.trust.fetch(self.store, path, PAYLOAD_TYPE, max_bytes=MAX_ENVELOPE_BYTES)
        where = url_of(self.store, path)
        snapshot = decode(trusted.payload, where)
        if snapshot.key != key:
            raise Untrusted(f"{where}: is the snapshot of another key, {snapshot.key}; delete it")
        return snapshot, trusted.because

    # ---- private methods -----------------------------------------------------------------------------------

    async def _find(self, key: str, now_s: float, refused: Refused) -> FoundSnapshot | None:
        try:
            numbers, used_s = await self._generations(key)
        except Untrusted as error:
            refused(str(error))
            return None
        for number in numbers[:MAX_EXAMINED]:
            try:
                snapshot, because = await self.read(key, number)
            except IntegrityError as error:
                refused(str(error))
                continue
            except NotFound:
                continue  # garbage-collected meanwhile
            except StorageError as error:
                if error.retryable:
                    raise
                refused(str(error))  # not a file, or not readable for this user
                continue
            if not is_expired(snapshot, now_s):
                return FoundSnapshot(snapshot, because, number, used_s)
        return None

    async def _generations(self, key: str) -> tuple[list[int], float]:
        """Return the numbers, the highest first, and the last touch of the key's stamp."""
        if is_web(self.store.url):
            return await probe(self.store, lambda number: env_path(key, number)), 0.0
        await refuse_links(self.store, key_folder(key))
        entries = await list_if_there(self.store, key_folder(key))
        used_s = max((entry.mtime_s for entry in entries if entry.name == USED), default=0.0)
        return sorted((number for entry in entries if (number := generation_of(entry.name))), reverse=True), used_s

    async def _publish_document(self, path: str, document: bytes) -> None:
        try:
            await self.store.publish(path, document, if_absent=True)
        except AlreadyExists:
            try:
                is_same = await read_small(self.store, path, MAX_DOCUMENT_BYTES) == document
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

    # ---- list (last, as its name hides the type) --------------------------------------------------------------

    async def list(self, now_s: float) -> list[ListedKey]:
        """Return all keys. Raises: StorageError."""

        async def look(entry: Entry) -> ListedKey | None:
            refused: list[str] = []
            try:
                found = await self._find(entry.name, now_s, refused.append)
                stored_bytes = await self.stored_bytes(entry.name)
                if found is None and not refused and not await self._has_document(entry.name):
                    return None  # a build has begun there, whose result has another key
            except Untrusted as error:
                return ListedKey(entry.name, None, [str(error)], 0)
            return ListedKey(entry.name, found, refused, stored_bytes)

        listed = await aio.map_bounded(look, await self.keys(), width=LIST_AT_ONCE)
        return [each for each in listed if each is not None]


def _decode(data: bytes, snapshot: Snapshot, where: str) -> Index:
    """Decode the index of a snapshot's tree, if it can be an environment."""
    index = indexes.decode(data, snapshot.tree, where)
    reason = find_tree_fault(index, len(snapshot.targets))
    if reason:
        raise IntegrityError(f"{where}: {reason}")
    return index
