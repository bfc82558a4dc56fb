"""A lease that is held: its heartbeats, its status text, its release. `bootseer.env.store.lease` acquires leases.

Only the store's answers count: a holder that cannot write keeps trying. A higher number shows that another node
considers it dead.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from bootseer import aio
from bootseer.env.store.lease_record import DONE, FAILED, MAX_MISSED, WORKING, encode, make_record
from bootseer.env.store_layout import key_folder, lease_number_of, lease_path
from bootseer.errors import StorageError
from bootseer.logs import get_logger
from bootseer.storage import Store
from bootseer.storage.small_files import list_if_there

_log = get_logger(__name__)

WRITING = aio.RetryPolicy(tries=4, base_s=0.1, max_s=1.0, budget_s=10.0)

Clock = Callable[[], float]
Pause = Callable[[float, asyncio.Event], Awaitable[None]]  # waits so many seconds, or until the event


async def pause_until(seconds: float, event: asyncio.Event) -> None:
    """Wait in real time."""
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


class Lease:
    """The right to build; `keep` renews it, `release` ends it. For one event loop."""

    def __init__(
        self,
        store: Store,
        key: str,
        number: int,
        owner: str,
        beat_s: float,
        clock: Clock,
        pause: Pause,
    ) -> None:
        self.key, self.number, self.nonce = key, number, secrets.token_hex(16)
        self.lost_reason = ""  # set if another node has taken it over; the result may still be published
        self.missed = 0  # consecutive heartbeats that could not be written
        self._store, self._owner, self._beat_s = store, owner, beat_s
        self._clock, self._pause = clock, pause
        self._began_s = clock()
        self._beat = 0
        self._text = ""
        self._ended = asyncio.Event()
        self._writing = asyncio.Lock()

    def tell(self, text: str) -> None:
        """Set the status text that the next heartbeat sends to waiting nodes; without secrets. From any thread."""
        self._text = text

    async def keep(self) -> None:
        """Send heartbeats until `release`, or until another node has the lease. Retry if the store fails."""
        next_s = self._clock() + self._beat_s
        while not self._ended.is_set() and not self.lost_reason:
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
                    if self.missed == MAX_MISSED:
                        _log.warning(
                            "other nodes consider this builder dead: its lease cannot be renewed: %s", error
                        )

    async def release(self, state: str = DONE, text: str = "") -> bool:
        """Publish the final state for waiting nodes, once. Returns: whether they can read it."""
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
                _log.warning("the lease cannot be released, other nodes detect it after a while: %s", error)
                return False
        return True

    def next_record(self, state: str) -> bytes:
        """Return the next heartbeat in its stored form."""
        self._beat += 1
        held_s = self._clock() - self._began_s
        return encode(make_record(self.nonce, self._beat, self._owner, state, self._text, held_s))

    async def _is_highest(self) -> bool:
        numbers = await list_leases(self._store, self.key)
        if not numbers or numbers[-1] <= self.number:
            return True
        if not self.lost_reason:
            self.lost_reason = f"{key_folder(self.key)}: another node considers this builder dead, and builds too"
            _log.info("%s", self.lost_reason)
        return False


@contextmanager
def renewing(lease: Lease) -> Iterator[Lease]:
    """Renew a lease while blocking code builds; then release it, unless done, as DONE, or FAILED after an error.

    The lease belongs to aio's background loop: `aio.run_sync` has acquired it.
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
    """List the numbers of a key's leases, ascending. Raises: StorageError."""
    entries = await list_if_there(store, key_folder(key))
    return sorted(number for entry in entries if (number := lease_number_of(entry.name)))
