"""A lease that is held: its beats, what it says, how it ends. `bootseer.env.lease` takes them.

Only the store's answers count: a holder that cannot write goes on trying, and learns from a higher number that
somebody took it for dead.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from bootseer import aio
from bootseer.env.layout import key_folder, lease_number_of, lease_path
from bootseer.env.lease_record import DONE, FAILED, MISSES, WORKING, encode, make_record
from bootseer.errors import NotFound, StorageError
from bootseer.storage import Store

WRITING = aio.RetryPolicy(tries=4, base_s=0.1, most_s=1.0, budget_s=10.0)

Say = Callable[[str], object]  # a line for people
Clock = Callable[[], float]
Pause = Callable[[float, asyncio.Event], Awaitable[None]]  # so many seconds, or until the event


async def pause_until(seconds: float, event: asyncio.Event) -> None:
    """The pause of real clocks."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


class Lease:
    """The right to build; `keep` keeps it, `release` ends it. For one event loop."""

    def __init__(
        self,
        store: Store,
        key: str,
        number: int,
        owner: str,
        beat_s: float,
        clock: Clock,
        pause: Pause,
        say: Say,
    ) -> None:
        self.key, self.number, self.nonce = key, number, secrets.token_hex(16)
        self.why_lost = ""  # somebody else has it; what was built may still be published
        self.missed = 0  # beats in a row that could not be written
        self._store, self._owner, self._beat_s = store, owner, beat_s
        self._clock, self._pause, self._say = clock, pause, say
        self._began_s = clock()
        self._beat = 0
        self._text = ""
        self._ended = asyncio.Event()
        self._writing = asyncio.Lock()

    def tell(self, text: str) -> None:
        """What it does now, for those who wait, with the next beat; without secrets. From any thread."""
        self._text = text

    async def keep(self) -> None:
        """Beats until `release`, or until somebody else has the lease. A store that fails is tried again."""
        next_s = self._clock() + self._beat_s
        while not self._ended.is_set() and not self.why_lost:
            await self._pause(max(0.0, next_s - self._clock()), self._ended)
            next_s = self._clock() + self._beat_s
            async with self._writing:
                if self._ended.is_set():
                    return
                try:
                    if await self._is_highest():
                        await self._store.publish(lease_path(self.key, self.number), self.next_record(WORKING))
                    self.missed = 0
                except StorageError as error:
                    self.missed += 1
                    if self.missed == MISSES:
                        self._say(
                            "warning: other nodes take this builder for dead, as its lease cannot be kept:"
                            f" {error}"
                        )

    async def release(self, state: str = DONE, text: str = "") -> bool:
        """Says to those who wait how it ended; once. Returns: whether they will read it."""
        if self._ended.is_set():
            return False
        self._ended.set()
        self._text = text
        async with self._writing:
            try:
                if not await self._is_highest():
                    return False
                data = self.next_record(state)

                async def write(_: int) -> None:
                    await self._store.publish(lease_path(self.key, self.number), data)

                await aio.retry(WRITING, write)
            except StorageError as error:
                self._say(f"warning: the lease could not be given back, others will notice in a while: {error}")
                return False
        return True

    def next_record(self, state: str) -> bytes:
        """The next beat, as it is stored."""
        self._beat += 1
        held_s = self._clock() - self._began_s
        return encode(make_record(self.nonce, self._beat, self._owner, state, self._text, held_s))

    async def _is_highest(self) -> bool:
        numbers = await list_leases(self._store, self.key)
        if not numbers or numbers[-1] <= self.number:
            return True
        if not self.why_lost:
            self.why_lost = f"{key_folder(self.key)}: another node took this builder for dead and builds too"
            self._say(self.why_lost)
        return False


@contextmanager
def kept(lease: Lease) -> Iterator[Lease]:
    """Keeps a lease while plain code builds; then it is DONE, after an error FAILED, unless that was said before.

    The lease belongs to aio's background loop: it was taken by `aio.run_sync`.
    """
    thread = threading.Thread(target=lambda: aio.run_sync(lease.keep()), name="env-lease", daemon=True)
    thread.start()
    try:
        yield lease
    except BaseException:
        aio.run_sync(lease.release(FAILED, "the builder ended with an error"))
        raise
    else:
        aio.run_sync(lease.release(DONE))
    finally:
        thread.join()


async def list_leases(store: Store, key: str) -> list[int]:
    """Numbers of a key's leases, ascending. Raises: StorageError."""
    try:
        entries = await store.list(key_folder(key))
    except NotFound:
        return []
    return sorted(number for entry in entries if (number := lease_number_of(entry.name)))
