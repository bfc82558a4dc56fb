"""What set-ups have read, as a store has it: lists under the key of a first guess, signed as snapshots are.

In: a store, who is believed. Out: lists that are believed; what cannot be used is passed over, `say` is told why.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from bootseer import aio
from bootseer.env.held_lease import WRITING
from bootseer.env.layout import DOCUMENT, MOST_NUMBER, USED, reads_folder, reads_number_of, reads_path
from bootseer.env.links import refuse_links
from bootseer.env.reads import MOST_ENVELOPE_BYTES, PAYLOAD_TYPE, Reads, decode, encode
from bootseer.errors import AlreadyExists, BootseerError, IntegrityError, NotFound, StorageError, Untrusted
from bootseer.storage import Store
from bootseer.storage.paths import scheme_of
from bootseer.trust import SigningKey, Trust, seal
from bootseer.trust.reading import place_of

MOST_LOOKED_AT = 32  # of numbered files of one kind, the highest first
MOST_PROBED = 1000  # of a store that cannot be listed
PUBLISH_TRIES = 8  # somebody else may publish at the same moment
AT_ONCE = 8

Say = Callable[[str], object]


class StoredReads:
    """Of one store, for one event loop."""

    def __init__(self, store: Store, trust: Trust, say: Say) -> None:
        self._store, self._trust, self._say = store, trust, say

    async def find(self, guess: str, refused: Say | None = None) -> list[Reads]:
        """What set-ups of a first guess have read, the newest first.

        Args: refused: gets a line about each that is passed over, by default as `say` does. Raises: StorageError.
        """
        refused = refused or self._say
        try:
            numbers = await self._numbers(guess)
        except Untrusted as error:
            refused(str(error))
            return []

        async def read(number: int) -> Reads | None:
            return await self._read(guess, number, refused)

        found = await aio.map_bounded(read, numbers[:MOST_LOOKED_AT], width=AT_ONCE)
        return list({encode(each): each for each in found if each is not None}.values())

    async def publish(self, document: bytes, reads: Reads, signing: SigningKey | None) -> None:
        """Before the environment that it leads to. What is among the newest is not written again.

        Args: document: of the first guess. Raises: IntegrityError; StorageError; Untrusted for links in the store.
        """
        guess, payload = reads.guess, encode(reads)
        where = place_of(self._store, reads_folder(guess))
        if hashlib.sha256(document).hexdigest() != guess:
            raise IntegrityError(f"{where}: this document is not that of the key")
        envelope = seal(payload, PAYLOAD_TYPE, signing)
        if len(envelope) > MOST_ENVELOPE_BYTES:
            raise IntegrityError(f"{where}: {len(envelope)} bytes; at most {MOST_ENVELOPE_BYTES}")
        await refuse_links(self._store, reads_folder(guess))
        for _ in range(PUBLISH_TRIES):
            if any(encode(each) == payload for each in await self.find(guess)):
                return
            numbers = await self._numbers(guess)
            path = reads_path(guess, numbers[0] + 1 if numbers else 1)
            if not numbers:
                await self._store.publish(f"{reads_folder(guess)}/{DOCUMENT}", document)  # for people

            async def create(_: int, path: str = path) -> None:
                await self._store.publish(path, envelope, if_absent=True)

            try:
                await aio.retry(WRITING, create)
            except AlreadyExists:
                continue
        raise StorageError(f"{where}: does not show what was written there")

    async def touch(self, guess: str, now_s: float) -> None:
        """Notes that they are used; a store that fails, or is only read, does not matter."""
        if is_web(self._store) or not guess:
            return
        try:
            await refuse_links(self._store, reads_folder(guess))
            await self._store.publish(f"{reads_folder(guess)}/{USED}", b"%d\n" % int(now_s))
        except BootseerError:
            pass

    async def _read(self, guess: str, number: int, refused: Say) -> Reads | None:
        path = reads_path(guess, number)
        where = place_of(self._store, path)
        try:
            await refuse_links(self._store, path)
            believed = await self._trust.fetch(self._store, path, PAYLOAD_TYPE, most_bytes=MOST_ENVELOPE_BYTES)
            found = decode(believed.payload, where)
            if found.guess != guess:
                raise Untrusted(f"{where}: belongs to another key, {found.guess}: delete it")
        except IntegrityError as error:
            refused(str(error))
            return None
        except NotFound:
            return None  # collected meanwhile
        except StorageError as error:
            if error.retryable:
                raise
            refused(str(error))  # it is no file, or one that this user may not read
            return None
        return found

    async def _numbers(self, guess: str) -> list[int]:
        """The highest first."""
        if is_web(self._store):
            return await probe(self._store, lambda number: reads_path(guess, number))
        await refuse_links(self._store, reads_folder(guess))
        try:
            entries = await self._store.list(reads_folder(guess))
        except NotFound:
            return []
        return sorted((number for entry in entries if (number := reads_number_of(entry.name))), reverse=True)


def is_web(store: Store) -> bool:
    """Whether it is a web server's, which lists nothing."""
    return scheme_of(store.url) in ("http", "https")


async def probe(store: Store, path: Callable[[int], str]) -> list[int]:
    """Numbers that there are, the highest first: 1, 2, 3 ... up to the first that is missing."""
    for number in range(1, min(MOST_PROBED, MOST_NUMBER) + 1):
        try:
            await store.stat(path(number))
        except NotFound:
            return list(range(number - 1, 0, -1))
    return list(range(MOST_PROBED, 0, -1))
