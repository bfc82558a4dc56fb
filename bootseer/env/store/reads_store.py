"""Lists of reads in a store: under the key of a first guess, and signed like snapshots.

In: a store, the trusted signers. Out: trusted lists. Unusable lists are skipped, and the reason is logged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from bootseer import aio
from bootseer.env.reads.read_list import MAX_ENVELOPE_BYTES, PAYLOAD_TYPE, Reads, decode, encode
from bootseer.env.store.held_lease import WRITING
from bootseer.env.store.links import refuse_links
from bootseer.env.store_layout import DOCUMENT, MAX_NUMBER, USED, reads_directory, reads_number_of, reads_path
from bootseer.errors import AlreadyExists, BootseerError, IntegrityError, NotFound, StorageError, Untrusted
from bootseer.logs import get_logger
from bootseer.storage import Store
from bootseer.storage.paths import is_web
from bootseer.storage.small_files import list_if_there, url_of
from bootseer.trust import SigningKey, Trust, seal

_log = get_logger(__name__)

MAX_EXAMINED = 32  # of numbered files of one kind, the highest first
MAX_PROBED = 1000  # in a store that cannot be listed
PUBLISH_TRIES = 8  # another process may publish at the same moment
AT_ONCE = 8

Refused = Callable[[str], object]  # gets the reason why an item is skipped


class StoredReads:
    """The lists of one store, for one event loop."""

    def __init__(self, store: Store, trust: Trust) -> None:
        self._store, self._trust = store, trust

    async def find(self, guess: str, refused: Refused | None = None) -> list[Reads]:
        """Return what set-ups of a first guess have read, the newest first.

        Args: refused: receives a line about each list that is skipped (default: it is logged).
        Raises: StorageError.
        """
        refused = refused or _log.info
        try:
            numbers = await self._numbers(guess)
        except Untrusted as error:
            refused(str(error))
            return []

        async def read(number: int) -> Reads | None:
            return await self._read(guess, number, refused)

        found = await aio.map_bounded(read, numbers[:MAX_EXAMINED], width=AT_ONCE)
        return list({encode(each): each for each in found if each is not None}.values())

    async def publish(self, document: bytes, reads: Reads, signing: SigningKey | None) -> None:
        """Publish reads before their environment, unless they are among the newest.

        Args: document: of the first guess.
        Raises: IntegrityError; StorageError; Untrusted for links in the store.
        """
        guess, payload = reads.guess, encode(reads)
        where = url_of(self._store, reads_directory(guess))
        if hashlib.sha256(document).hexdigest() != guess:
            raise IntegrityError(f"{where}: the document does not match the key")
        envelope = seal(payload, PAYLOAD_TYPE, signing)
        if len(envelope) > MAX_ENVELOPE_BYTES:
            raise IntegrityError(f"{where}: {len(envelope)} bytes; at most {MAX_ENVELOPE_BYTES}")
        await refuse_links(self._store, reads_directory(guess))
        for _ in range(PUBLISH_TRIES):
            if any(encode(each) == payload for each in await self.find(guess)):
                return
            numbers = await self._numbers(guess)
            path = reads_path(guess, numbers[0] + 1 if numbers else 1)
            if not numbers:
                await self._store.publish(f"{reads_directory(guess)}/{DOCUMENT}", document)  # for users

            async def create(_: int, path: str = path) -> None:
                await self._store.publish(path, envelope, if_absent=True)

            try:
                await aio.retry(WRITING, create)
            except AlreadyExists:
                continue
        raise StorageError(f"{where}: does not return what was written there")

    async def touch(self, guess: str, now_s: float) -> None:
        """Record that the lists are used; failures and read-only stores are ignored."""
        if is_web(self._store.url) or not guess:
            return
        try:
            await refuse_links(self._store, reads_directory(guess))
            await self._store.publish(f"{reads_directory(guess)}/{USED}", b"%d\n" % int(now_s))
        except BootseerError:
            pass

    async def _read(self, guess: str, number: int, refused: Refused) -> Reads | None:
        path = reads_path(guess, number)
        where = url_of(self._store, path)
        try:
            await refuse_links(self._store, path)
            trusted = await self._trust.fetch(self._store, path, PAYLOAD_TYPE, max_bytes=MAX_ENVELOPE_BYTES)
            found = decode(trusted.payload, where)
            if found.guess != guess:
                raise Untrusted(f"{where}: belongs to another key, {found.guess}; delete it")
        except IntegrityError as error:
            refused(str(error))
            return None
        except NotFound:
            return None  # garbage-collected meanwhile
        except StorageError as error:
            if error.retryable:
                raise
            refused(str(error))  # not a file, or not readable for this user
            return None
        return found

    async def _numbers(self, guess: str) -> list[int]:
        """Return the numbers of the lists, the highest first."""
        if is_web(self._store.url):
            return await probe(self._store, lambda number: reads_path(guess, number))
        await refuse_links(self._store, reads_directory(guess))
        entries = await list_if_there(self._store, reads_directory(guess))
        return sorted((number for entry in entries if (number := reads_number_of(entry.name))), reverse=True)


async def probe(store: Store, path: Callable[[int], str]) -> list[int]:
    """Return existing numbers, the highest first: 1, 2, 3 ... up to the first missing one."""
    for number in range(1, min(MAX_PROBED, MAX_NUMBER) + 1):
        try:
            await store.stat(path(number))
        except NotFound:
            return list(range(number - 1, 0, -1))
    return list(range(MAX_PROBED, 0, -1))
