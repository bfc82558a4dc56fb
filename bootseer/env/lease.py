"""One builder for each key: a lease in the environment store, kept by beats, taken over from a holder that died.

`acquire` gives the snapshot when it is there, or the lease. All is measured by the monotonic clock of whoever
looks; no two clocks are compared. A lease saves work and decides nothing: of two that build all the same (one was
stopped for long), one publishes. Numbers of leases only go up, and the highest counts, so a holder that was taken
for dead finds out.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

from bootseer import aio
from bootseer.env.held_lease import WRITING, Clock, Pause, Say, pause_until
from bootseer.env.held_lease import Lease as Lease
from bootseer.env.held_lease import kept as kept
from bootseer.env.held_lease import list_leases as list_leases
from bootseer.env.layout import key_folder, lease_path
from bootseer.env.lease_record import DONE, FAILED, MOST_LEASE_BYTES, WORKING, LeaseRecord, Watch, decode
from bootseer.env.links import refuse_links
from bootseer.errors import AlreadyExists, IntegrityError, NotFound, StorageError
from bootseer.storage import Store
from bootseer.trust.reading import place_of, read_whole

BEAT_S = 5.0
LEAST_LOOK_S, LOOK_SHARE = 0.2, 0.1  # between looks of one that waits: a tenth of how long it has waited

T = TypeVar("T")
Until = Callable[[], Awaitable[T | None]]


class Holder(NamedTuple):
    """Somebody who builds, or seems to."""

    owner: str
    state: str  # what it says it does
    since_s: float  # how long it has had the lease, by its own clock
    number: int
    nonce: str = ""  # of its lease, if that can be read


class Cannot(NamedTuple):
    """Why nothing can be published here; every node installs for itself."""

    why: str  # one line


class Ready(NamedTuple, Generic[T]):
    """The wait is over: it is there."""

    found: T


class Over(NamedTuple):
    """The wait is over without it."""

    why: str  # one line


class Seen(NamedTuple):
    """The highest lease of a key."""

    number: int
    token: str  # differs from beat to beat
    record: LeaseRecord | None  # None for what is no lease

    @property
    def is_working(self) -> bool:
        """Of what is no lease, nobody knows: it may be one of a newer version."""
        return self.record is None or self.record.state == WORKING

    @property
    def holder(self) -> Holder:
        if self.record is None:
            return Holder("somebody whose lease cannot be read", "", 0.0, self.number)
        return Holder(self.record.owner, self.record.text, self.record.held_s, self.number, self.record.nonce)


class BuilderLease:
    """Leases of one store, for one event loop.

    Args:
        owner: host and process, for people.
        beat_s: the same for all who use the store.
    """

    def __init__(
        self,
        store: Store,
        *,
        owner: str,
        beat_s: float = BEAT_S,
        clock: Clock = time.monotonic,
        pause: Pause = pause_until,
        say: Say = lambda _: None,
    ) -> None:
        self._store, self._owner, self.beat_s = store, owner, beat_s
        self._clock, self._pause, self._say = clock, pause, say

    async def acquire(self, key: str, until: Until[T], bound_s: float) -> Ready[T] | Lease | Over | Cannot:
        """What `until` gives, as soon as it gives something, else the lease.

        Waits at most `bound_s` for another holder. `until` looks for the snapshot; it is asked again once the
        lease is taken, as the last holder may have published at that moment.
        Raises: StorageError when the store cannot be used; Untrusted for a store with links in it.
        """
        found = await until()
        if found is not None:
            return Ready(found)
        taken = await self.try_take(key)
        if isinstance(taken, Holder):
            return await self.wait(key, until, bound_s, holder=taken)
        if isinstance(taken, Cannot):
            return taken
        return await self._look_again(taken, until)

    async def try_take(self, key: str) -> Lease | Holder | Cannot:
        """The lease, unless somebody has it: whether that one lives, `wait` finds out."""
        if not self._store.features.creates_if_absent:
            return Cannot(
                f"{self._store.url}: this store cannot create a file exactly once, so it has no builder:"
                " every node installs for itself"
            )
        await refuse_links(self._store, key_folder(key))
        seen = await self.look(key)
        if seen is not None and seen.is_working:
            return seen.holder
        return await self._take(key, 1 if seen is None else seen.number + 1)

    async def wait(
        self, key: str, until: Until[T], bound_s: float, *, holder: Holder | None = None
    ) -> Ready[T] | Lease | Over | Cannot:
        """Until the snapshot is there, its builder failed, died (then the lease is ours), or `bound_s` is over.

        `holder`: who was seen at work before.
        """
        began_s = self._clock()
        watch = Watch(self.beat_s)
        nothing = asyncio.Event()
        while True:
            try:
                found = await until()
                if found is not None:
                    return Ready(found)
                seen = await self.look(key)
                if seen is not None and seen.is_working:
                    holder = seen.holder
                    is_dead = watch.see(seen.token, self._clock())
                else:
                    is_dead = True
                    record = None if seen is None else seen.record
                    was_seen = holder is not None and record is not None and record.nonce == holder.nonce
                    if was_seen and record is not None and record.state == FAILED:
                        return Over(f"{record.owner} failed to build the environment: {record.text}")
                if is_dead:
                    taken = await self._take(key, 1 if seen is None else seen.number + 1)
                    if isinstance(taken, Lease):
                        if seen is not None and seen.is_working:
                            self._say(f"{seen.holder.owner} was building the environment and is gone: taken over")
                        return await self._look_again(taken, until)
                    if isinstance(taken, Cannot):
                        return taken
            except StorageError as error:
                if not error.retryable:
                    raise
                watch.lose_sight()
            left_s = began_s + bound_s - self._clock()
            if left_s <= 0:
                who = "another node" if holder is None else holder.owner
                return Over(f"{who} has not finished the environment within {bound_s:g} s")
            step_s = max(min(LEAST_LOOK_S, self.beat_s / 5), LOOK_SHARE * (self._clock() - began_s))
            await self._pause(min(step_s, self.beat_s, left_s), nothing)

    async def look(self, key: str) -> Seen | None:
        """The highest lease, as it is now; None if there is none. Raises: StorageError."""
        number = 0
        for _ in range(3):
            numbers = await list_leases(self._store, key)
            if not numbers:
                return None
            number = numbers[-1]
            path = lease_path(key, number)
            try:
                data = await read_whole(self._store, path, MOST_LEASE_BYTES)
            except NotFound:
                continue  # taken away, as there is a higher one
            except (IntegrityError, StorageError) as error:
                if error.retryable:
                    raise
                self._say(str(error))
                return Seen(number, str(error), None)  # too large, no file, or not to be read by this user
            token = hashlib.sha256(data).hexdigest()
            try:
                return Seen(number, token, decode(data, place_of(self._store, path)))
            except IntegrityError as error:
                self._say(str(error))
                return Seen(number, token, None)
        return Seen(number, "a name without a file", None)  # a folder

    async def _look_again(self, lease: Lease, until: Until[T]) -> Ready[T] | Lease:
        try:
            found = await until()
        except BaseException:
            await lease.release(FAILED, "the store could not be read")
            raise
        if found is None:
            return lease
        await lease.release(DONE)
        return Ready(found)

    async def _take(self, key: str, number: int) -> Lease | Holder | Cannot:
        lease = Lease(self._store, key, number, self._owner, self.beat_s, self._clock, self._pause, self._say)
        path = lease_path(key, number)
        data = lease.next_record(WORKING)

        async def create(_: int) -> None:
            await self._store.publish(path, data, if_absent=True)

        try:
            await aio.retry(WRITING, create)
        except AlreadyExists:
            seen = await self.look(key)
            # The answer to a first try may have been lost.
            if seen is None or seen.record is None or seen.record.nonce != lease.nonce:
                return Holder("somebody", "", 0.0, number) if seen is None else seen.holder
        try:
            await self._store.publish(path, data, if_absent=True)
        except AlreadyExists:
            pass
        else:
            await self._store.delete(path)
            return Cannot(
                f"{self._store.url}: this store overwrites what was to be created only if absent (it passes over"
                " If-None-Match), so it has no builder: every node installs for itself"
            )
        numbers = await list_leases(self._store, key)
        if numbers and numbers[-1] > number:  # ours was chosen from a list that is no longer true
            await self._store.delete(path)
            seen = await self.look(key)
            return Holder("somebody", "", 0.0, numbers[-1]) if seen is None else seen.holder
        for older in numbers:
            if older < number:
                try:
                    await self._store.delete(lease_path(key, older))
                except StorageError:
                    break  # only less tidy
        return lease
