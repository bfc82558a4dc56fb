"""One builder for each key: a lease in the environment store, renewed by heartbeats, taken from a dead holder.

`acquire` returns the snapshot once it exists, or the lease. Each node measures times by its own monotonic clock;
no two clocks are compared. A lease only saves work: if two nodes build after all (one was stopped for long), one
publishes. Numbers of leases only increase, and the highest counts, so a holder that others consider dead detects
it.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from bootseer import aio
from bootseer.env.store.held_lease import WRITING, Clock, Pause, pause_until
from bootseer.env.store.held_lease import Lease as Lease
from bootseer.env.store.held_lease import list_leases as list_leases
from bootseer.env.store.held_lease import renewing as renewing
from bootseer.env.store.lease_record import (
    DONE,
    FAILED,
    MAX_LEASE_BYTES,
    WORKING,
    LeaseRecord,
    MissedHeartbeats,
    decode,
)
from bootseer.env.store.links import refuse_links
from bootseer.env.store_layout import key_folder, lease_path
from bootseer.errors import AlreadyExists, IntegrityError, NotFound, StorageError
from bootseer.logs import get_logger
from bootseer.storage import Store
from bootseer.storage.small_files import read_small, url_of

_log = get_logger(__name__)

HEARTBEAT_S = 5.0
MIN_LOOK_S, POLL_SHARE = 0.2, 0.1  # polling interval of a waiting node: a tenth of its wait so far

T = TypeVar("T")
Until = Callable[[], Awaitable[T | None]]


class LeaseHolder(NamedTuple):
    """The holder of a lease, alive or not."""

    owner: str
    state: str  # its status text
    since_s: float  # how long it has had the lease, by its own clock
    number: int
    nonce: str = ""  # of its lease, if that can be read


class LeaseUnavailable(NamedTuple):
    """The reason why nothing can be published here; each node installs on its own."""

    why: str  # one line


class WaitResult(NamedTuple, Generic[T]):
    found: T


class WaitEnded(NamedTuple):
    """The wait has ended without a result."""

    why: str  # one line


class ObservedLease(NamedTuple):
    """The highest lease of a key."""

    number: int
    token: str  # changes with each heartbeat
    record: LeaseRecord | None  # None if it is not a valid lease

    @property
    def is_working(self) -> bool:
        """Whether the holder is building. An invalid lease counts: it may be one of a newer version."""
        return self.record is None or self.record.state == WORKING

    @property
    def holder(self) -> LeaseHolder:
        if self.record is None:
            return LeaseHolder("a process with an unreadable lease", "", 0.0, self.number)
        return LeaseHolder(self.record.owner, self.record.text, self.record.held_s, self.number, self.record.nonce)


class BuilderLease:
    """Leases of one store, for one event loop.

    Args:
        owner: host and process, for messages.
        beat_s: interval of heartbeats, the same for all users of the store.
    """

    def __init__(
        self,
        store: Store,
        *,
        owner: str,
        beat_s: float = HEARTBEAT_S,
        clock: Clock = time.monotonic,
        pause: Pause = pause_until,
    ) -> None:
        self._store, self._owner, self.beat_s = store, owner, beat_s
        self._clock, self._pause = clock, pause

    async def acquire(
        self, key: str, until: Until[T], bound_s: float
    ) -> WaitResult[T] | Lease | WaitEnded | LeaseUnavailable:
        """Return the result of `until` as soon as it has one, else the lease.

        Wait at most `bound_s` for another holder. `until` searches for the snapshot. It is called again once the
        lease is acquired, as the last holder may have published at that moment.
        Raises: StorageError if the store cannot be used; Untrusted for a store that contains links.
        """
        found = await until()
        if found is not None:
            return WaitResult(found)
        taken = await self.try_take(key)
        if isinstance(taken, LeaseHolder):
            return await self.wait(key, until, bound_s, holder=taken)
        if isinstance(taken, LeaseUnavailable):
            return taken
        return await self._check_again(taken, until)

    async def try_take(self, key: str) -> Lease | LeaseHolder | LeaseUnavailable:
        """Return the lease, or its holder: `wait` detects whether that one is alive."""
        if not self._store.features.creates_if_absent:
            return LeaseUnavailable(
                f"{self._store.url}: this store cannot create a file exactly once, so it has no builder:"
                " each node installs on its own"
            )
        await refuse_links(self._store, key_folder(key))
        seen = await self.look(key)
        if seen is not None and seen.is_working:
            return seen.holder
        return await self._take(key, 1 if seen is None else seen.number + 1)

    async def wait(
        self, key: str, until: Until[T], bound_s: float, *, holder: LeaseHolder | None = None
    ) -> WaitResult[T] | Lease | WaitEnded | LeaseUnavailable:
        """Wait for the snapshot, or until its builder fails, dies (then return the lease), or `bound_s` is over.

        `holder`: the builder that was observed before.
        """
        began_s = self._clock()
        watch = MissedHeartbeats(self.beat_s)
        nothing = asyncio.Event()
        while True:
            try:
                found = await until()
                if found is not None:
                    return WaitResult(found)
                seen = await self.look(key)
                if seen is not None and seen.is_working:
                    holder = seen.holder
                    is_dead = watch.see(seen.token, self._clock())
                else:
                    is_dead = True
                    record = None if seen is None else seen.record
                    was_seen = holder is not None and record is not None and record.nonce == holder.nonce
                    if was_seen and record is not None and record.state == FAILED:
                        return WaitEnded(f"{record.owner} failed to build the environment: {record.text}")
                if is_dead:
                    taken = await self._take(key, 1 if seen is None else seen.number + 1)
                    if isinstance(taken, Lease):
                        if seen is not None and seen.is_working:
                            _log.info("took over the environment build of %s, which is gone", seen.holder.owner)
                        return await self._check_again(taken, until)
                    if isinstance(taken, LeaseUnavailable):
                        return taken
            except StorageError as error:
                if not error.retryable:
                    raise
                watch.reset()
            left_s = began_s + bound_s - self._clock()
            if left_s <= 0:
                who = "another node" if holder is None else holder.owner
                return WaitEnded(f"{who} has not finished the environment within {bound_s:g} s")
            step_s = max(min(MIN_LOOK_S, self.beat_s / 5), POLL_SHARE * (self._clock() - began_s))
            await self._pause(min(step_s, self.beat_s, left_s), nothing)

    async def look(self, key: str, *, is_logged: bool = True) -> ObservedLease | None:
        """Read the highest lease; None if there is none. Args: is_logged: if unreadable. Raises: StorageError."""
        number = 0
        for _ in range(3):
            numbers = await list_leases(self._store, key)
            if not numbers:
                return None
            number = numbers[-1]
            path = lease_path(key, number)
            try:
                data = await read_small(self._store, path, MAX_LEASE_BYTES)
            except NotFound:
                continue  # removed, as there is a higher one
            except (IntegrityError, StorageError) as error:
                if error.retryable:
                    raise
                if is_logged:
                    _log.info("%s", error)
                return ObservedLease(
                    number, str(error), None
                )  # too large, not a file, or not readable by this user
            token = hashlib.sha256(data).hexdigest()
            try:
                return ObservedLease(number, token, decode(data, url_of(self._store, path)))
            except IntegrityError as error:
                if is_logged:
                    _log.info("%s", error)
                return ObservedLease(number, token, None)
        return ObservedLease(number, "a name without a file", None)  # a directory

    async def _check_again(self, lease: Lease, until: Until[T]) -> WaitResult[T] | Lease:
        try:
            found = await until()
        except BaseException:
            await lease.release(FAILED, "the store could not be read")
            raise
        if found is None:
            return lease
        await lease.release(DONE)
        return WaitResult(found)

    async def _take(self, key: str, number: int) -> Lease | LeaseHolder | LeaseUnavailable:
        lease = Lease(self._store, key, number, self._owner, self.beat_s, self._clock, self._pause)
        path = lease_path(key, number)
        data = lease.next_record(WORKING)

        async def create(_: int) -> None:
            await self._store.publish(path, data, if_absent=True)

        try:
            await aio.retry(WRITING, create)
        except AlreadyExists:
            seen = await self.look(key)
            # The answer to an earlier try may have been lost.
            if seen is None or seen.record is None or seen.record.nonce != lease.nonce:
                return LeaseHolder("another process", "", 0.0, number) if seen is None else seen.holder
        try:
            await self._store.publish(path, data, if_absent=True)
        except AlreadyExists:
            pass
        else:
            await self._store.delete(path)
            return LeaseUnavailable(
                f"{self._store.url}: this store overwrites files that should only be created if absent (it ignores"
                " If-None-Match), so it has no builder: each node installs on its own"
            )
        numbers = await list_leases(self._store, key)
        if numbers and numbers[-1] > number:  # this number was chosen from an outdated list
            await self._store.delete(path)
            seen = await self.look(key)
            return LeaseHolder("another process", "", 0.0, numbers[-1]) if seen is None else seen.holder
        for older in numbers:
            if older < number:
                try:
                    await self._store.delete(lease_path(key, older))
                except StorageError:
                    break  # leftovers do no harm
        return lease
