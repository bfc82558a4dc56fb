"""Leases of builders, by a clock of the test's own: who gets one, who waits how long, who finds out what."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer.env.store.lease import (
    BuilderLease,
    Lease,
    LeaseHolder,
    LeaseUnavailable,
    WaitEnded,
    WaitResult,
    list_leases,
)
from bootseer.env.store.lease_record import (
    DONE,
    FAILED,
    MAX_LEASE_BYTES,
    MAX_MISSED,
    WORKING,
    MissedHeartbeats,
    decode,
    encode,
    make_record,
)
from bootseer.errors import IntegrityError, PermissionDenied, StorageError, Unavailable
from bootseer.storage import Store, open_store
from bootseer.storage.memory import forget
from tests.testing.faulty_store import Fault, FaultyStore, Kind

T = TypeVar("T")
KEY = "c" * 64
BEAT_S = 5.0
numbers = itertools.count()


class Time:
    """Stands still while somebody works, and goes on when all wait."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._ends: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def pause(self, seconds: float, event: asyncio.Event) -> None:
        end_s = self.now_s + seconds
        self._ends.append(end_s)
        try:
            while self.now_s < end_s and not event.is_set():
                await asyncio.sleep(0)
        finally:
            self._ends.remove(end_s)

    async def go_on(self) -> None:
        """A task that runs until it is cancelled."""
        while True:
            for _ in range(60):  # whatever a call to a store in memory takes
                await asyncio.sleep(0)
            if self._ends:
                self.now_s = max(self.now_s, min(self._ends))

    async def until(self, condition: Callable[[], bool], max_s: float = 1000.0) -> None:
        end_s = self.now_s + max_s
        while not condition():
            assert self.now_s < end_s, "not in time"
            await self.pause(0.5, asyncio.Event())


@pytest.fixture
def store() -> Iterator[FaultyStore]:
    name = f"lease{next(numbers)}"
    yield FaultyStore(open_store(f"memory://{name}/envs"))
    forget(name)


class Node:
    """Somebody who wants the environment."""

    def __init__(self, time: Time, store: Store, name: str) -> None:
        self.lease = BuilderLease(store, owner=name, beat_s=BEAT_S, clock=time.clock, pause=time.pause)


def run(test: Callable[[Time], Coroutine[Any, Any, T]]) -> T:
    async def all_of_it() -> T:
        time = Time()
        async with asyncio.timeout(30), asyncio.TaskGroup() as group:
            clock = group.create_task(time.go_on())
            try:
                return await test(time)
            finally:
                clock.cancel()
        raise AssertionError

    return asyncio.run(all_of_it())


async def nothing() -> None:
    return None


async def take(node: Node) -> Lease:
    taken = await node.lease.try_take(KEY)
    assert isinstance(taken, Lease), taken
    return taken


# ---- what is stored ------------------------------------------------------------------------------------------

texts = st.text(max_size=700)


@given(
    st.text("0123456789abcdef", min_size=32, max_size=32),
    st.integers(1, 1 << 53),
    texts,
    st.sampled_from([WORKING, DONE, FAILED]),
    texts,
    st.floats(0, 1e9),
)
def test_records_round_trip(nonce: str, beat: int, owner: str, state: str, text: str, held_s: float) -> None:
    record = make_record(nonce, beat, owner, state, text, held_s)
    data = encode(record)
    assert len(data) <= MAX_LEASE_BYTES
    assert decode(data, "here") == record
    assert (record.owner + record.text).isprintable() or not record.owner + record.text


@given(st.binary(max_size=200) | st.sampled_from([b"[" * 5000, b"{}", b"null", b'{"nonce":1}', b" " * 9000]))
def test_rubbish_is_no_record(data: bytes) -> None:
    with pytest.raises(IntegrityError, match=r"^here: ") as caught:
        decode(data, "here")
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "change",
    [
        {"nonce": "x"}, {"nonce": "A" * 32}, {"beat": 0}, {"beat": -1}, {"beat": 1 << 54}, {"state": "dead"},
        {"owner": "a\x1b[2J"}, {"owner": "x" * 201}, {"text": "a\nb"}, {"text": "x" * 501}, {"held_s": -1.0},
        {"format": "bootseer-env-lease/2"}, {"more": 1},
    ],
)  # fmt: skip
def test_records_out_of_bounds(change: dict[str, Any]) -> None:
    import json

    fields = json.loads(encode(make_record("a" * 32, 1, "node1", WORKING, "pip", 1.0)))
    with pytest.raises(IntegrityError, match=r"^here: "):
        decode(json.dumps(fields | change).encode(), "here")


# ---- who counts as dead --------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.01, 4.99), min_size=5, max_size=200), st.floats(0, 4.99))
def test_one_that_heartbeats_is_never_dead(looks_s: list[float], phase_s: float) -> None:
    """Looks as far apart as a beat at most, beats that come up to a beat late."""
    watch, now_s = MissedHeartbeats(BEAT_S), 0.0
    for look_s in looks_s:
        now_s += look_s
        beat = int((now_s + phase_s) / (2 * BEAT_S))
        assert not watch.see(str(beat), now_s)


@given(st.lists(st.floats(0.01, 60.0), min_size=1, max_size=60))
def test_silence_is_death_after_three_heartbeats_and_as_many_looks(looks_s: list[float]) -> None:
    watch, now_s, dead_s = MissedHeartbeats(BEAT_S), 0.0, -1.0
    watch.see("a", now_s)
    for count, look_s in enumerate(looks_s, 1):
        now_s += look_s
        if watch.see("a", now_s):
            dead_s = now_s
            assert count >= MAX_MISSED
            assert dead_s >= MAX_MISSED * BEAT_S
            break
    if dead_s < 0:
        assert now_s < MAX_MISSED * (BEAT_S + max(looks_s))


def test_a_watcher_that_was_stopped_or_blind_does_not_judge() -> None:
    watch = MissedHeartbeats(BEAT_S)
    assert not watch.see("a", 0.0)
    assert not watch.see("a", 500.0), "one look after a long stop: one beat"
    watch.reset()
    assert not watch.see("a", 600.0)
    assert not watch.see("a", 605.0)
    assert not watch.see("a", 610.0)
    assert watch.see("a", 615.0)
    assert not watch.see("b", 615.0)


# ---- taking --------------------------------------------------------------------------------------------------


def test_one_of_many_gets_it(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        nodes = [Node(time, store, f"node{number}") for number in range(8)]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(node.lease.try_take(KEY)) for node in nodes]
        taken = [task.result() for task in tasks]
        (lease,) = [each for each in taken if isinstance(each, Lease)]
        holders = [each for each in taken if isinstance(each, LeaseHolder)]
        assert len(holders) == 7
        owner = nodes[taken.index(lease)].lease._owner
        assert {each.owner for each in holders} <= {owner, "another process"}
        assert await list_leases(store, KEY) == [1]

    run(test)


def test_numbers_go_up_and_old_ones_go(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        node = Node(time, store, "node1")
        for number in range(1, 6):
            lease = await take(node)
            assert lease.number == number
            assert await list_leases(store, KEY) == [number]
            assert isinstance(await Node(time, store, "node2").lease.try_take(KEY), LeaseHolder)
            assert await lease.release(DONE if number % 2 else FAILED)
            assert not await lease.release(), "only once"

    run(test)


def test_a_store_that_creates_nothing_exactly_once(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        store.features = store.features._replace(creates_if_absent=False)
        found = await Node(time, store, "node1").lease.acquire(KEY, nothing, 60)
        assert isinstance(found, LeaseUnavailable)
        assert "each node installs on its own" in found.why
        assert store.count("publish") == 0

    run(test)


def test_a_store_that_passes_over_conditions(store: FaultyStore) -> None:
    class Sloppy(FaultyStore):
        async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Any:
            return await super().publish(path, data, if_absent=False)

    async def test(time: Time) -> None:
        sloppy = Sloppy(store.inner)
        found = await Node(time, sloppy, "node1").lease.acquire(KEY, nothing, 60)
        assert isinstance(found, LeaseUnavailable)
        assert "If-None-Match" in found.why
        assert await list_leases(sloppy, KEY) == []

    run(test)


def test_the_answer_to_taking_is_lost(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        store.plan = [Fault(Kind.LOST, "publish", calls=range(2))]
        lease = await take(Node(time, store, "node1"))
        assert await list_leases(store, KEY) == [lease.number]

    run(test)


def test_a_number_that_is_no_longer_the_highest(store: FaultyStore) -> None:
    """It chose its number from a list that was true a while ago."""

    async def test(time: Time) -> None:
        slow, quick = Node(time, store, "slow"), Node(time, store, "quick")
        for _ in range(2):
            await (await take(quick)).release()
        third = await take(quick)
        await store.delete(f"keys/{KEY}/lease-000002.json")
        found = await slow.lease._take(KEY, 2)
        assert isinstance(found, LeaseHolder)
        assert (found.owner, found.number) == ("quick", third.number)
        assert await list_leases(store, KEY) == [3]

    run(test)


# ---- waiting -------------------------------------------------------------------------------------------------


class Shelf:
    """Where the snapshot comes to lie."""

    def __init__(self) -> None:
        self.found: str | None = None

    async def look(self) -> str | None:
        return self.found


async def building(group: asyncio.TaskGroup, node: Node) -> tuple[Lease, asyncio.Task[None]]:
    lease = await take(node)
    return lease, group.create_task(lease.keep())


def test_the_snapshot_comes(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        shelf, builder, waiter = Shelf(), Node(time, store, "builder"), Node(time, store, "waiter")
        async with asyncio.TaskGroup() as group:
            lease, _ = await building(group, builder)
            waiting = group.create_task(waiter.lease.acquire(KEY, shelf.look, 600))
            began_s = time.now_s
            await time.until(lambda: time.now_s > began_s + 100)
            assert not waiting.done()
            shelf.found = "snapshot"
            await lease.release()
            assert await waiting == WaitResult("snapshot")
            assert time.now_s - began_s < 100 + BEAT_S + 1
        assert await list_leases(store, KEY) == [1]

    run(test)


def test_it_is_there_already(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        shelf = Shelf()
        shelf.found = "snapshot"
        assert await Node(time, store, "node").lease.acquire(KEY, shelf.look, 600) == WaitResult("snapshot")
        assert not store.calls

    run(test)


def test_it_comes_while_the_lease_is_taken(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        answers = iter([None, "snapshot"])

        async def look() -> str | None:
            return next(answers)

        node = Node(time, store, "node")
        assert await node.lease.acquire(KEY, look, 600) == WaitResult("snapshot")
        await take(node)

    run(test)


def test_a_holder_that_dies_is_replaced(store: FaultyStore, said: list[str]) -> None:
    async def test(time: Time) -> None:
        lost, waiter = Node(time, store, "lost"), Node(time, store, "waiter")
        await take(lost)  # never beats
        began_s = time.now_s
        found = await waiter.lease.acquire(KEY, nothing, 600)
        assert isinstance(found, Lease)
        assert found.number == 2
        assert MAX_MISSED * BEAT_S <= time.now_s - began_s <= (MAX_MISSED + 2) * BEAT_S
        assert said == ["took over the environment build of lost, which is gone"]

    run(test)


def test_many_that_wait_replace_it_by_one(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        await take(Node(time, store, "lost"))
        shelf = Shelf()

        async def want(node: Node) -> str:
            found = await node.lease.acquire(KEY, shelf.look, 600)
            if isinstance(found, Lease):
                async with asyncio.TaskGroup() as group:
                    group.create_task(found.keep())
                    end_s = time.now_s + 60
                    await time.until(lambda: time.now_s > end_s)
                    assert shelf.found is None
                    shelf.found = "snapshot"
                    await found.release()
                return "built"
            assert found == WaitResult("snapshot")
            return "waited"

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(want(Node(time, store, f"node{number}"))) for number in range(6)]
        assert sorted(task.result() for task in tasks) == ["built"] + 5 * ["waited"]
        assert await list_leases(store, KEY) == [2]

    run(test)


def test_the_bound(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        async with asyncio.TaskGroup() as group:
            lease, _ = await building(group, Node(time, store, "builder"))
            began_s = time.now_s
            found = await Node(time, store, "waiter").lease.acquire(KEY, nothing, 42)
            assert isinstance(found, WaitEnded)
            assert found.why == "builder has not finished the environment within 42 s"
            assert 42 <= time.now_s - began_s < 43
            await lease.release()

    run(test)


def test_the_holder_says_that_it_failed(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        async with asyncio.TaskGroup() as group:
            lease, _ = await building(group, Node(time, store, "builder"))
            waiting = group.create_task(Node(time, store, "waiter").lease.acquire(KEY, nothing, 600))
            end_s = time.now_s + 30
            await time.until(lambda: time.now_s > end_s)
            await lease.release(FAILED, "pip ended with status 1")
            found = await waiting
            assert found == WaitEnded("builder failed to build the environment: pip ended with status 1")
        later = await take(Node(time, store, "next start"))
        assert later.number == 2, "a failure is not remembered"

    run(test)


def test_rubbish_in_the_place_of_a_lease(store: FaultyStore, said: list[str]) -> None:
    async def test(time: Time) -> None:
        for data in (b"\0rubbish", b"", b"x" * 100_000, b"[" * 5000):
            numbers_there = await list_leases(store, KEY)
            number = (numbers_there[-1] if numbers_there else 0) + 1
            await store.publish(f"keys/{KEY}/lease-{number:06d}.json", data)
            began_s = time.now_s
            node = Node(time, store, "node")
            assert isinstance(await node.lease.try_take(KEY), LeaseHolder), "it may be that of a newer version"
            lease = await node.lease.acquire(KEY, nothing, 600)
            assert isinstance(lease, Lease)
            assert lease.number == number + 1
            assert time.now_s - began_s <= (MAX_MISSED + 2) * BEAT_S
            assert all(line.isprintable() for line in said)
            await lease.release()

    run(test)


def test_a_store_that_fails_for_a_while(store: FaultyStore, said: list[str]) -> None:
    """Neither side draws conclusions from what it cannot see."""

    async def test(time: Time) -> None:
        builder, waiter = Node(time, store, "builder"), Node(time, store, "waiter")
        async with asyncio.TaskGroup() as group:
            lease, _ = await building(group, builder)
            waiting = group.create_task(waiter.lease.acquire(KEY, nothing, 600))
            began_s = time.now_s
            await time.until(lambda: time.now_s > began_s + 20)
            store.plan = [Fault(Kind.ERROR, operation) for operation in ("list", "publish", "read_into", "stat")]
            await time.until(lambda: time.now_s > began_s + 120)
            assert lease.missed > MAX_MISSED
            assert len(said) == 1
            assert "cannot be renewed" in said[0]
            store.plan = []
            await time.until(lambda: time.now_s > began_s + 160)
            assert lease.missed == 0
            assert not lease.lost_reason
            assert not waiting.done(), "it was not taken for dead"
            await lease.release(FAILED, "enough")
            assert isinstance(await waiting, WaitEnded)

    run(test)


def test_a_store_that_refuses_ends_the_wait(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        await take(Node(time, store, "builder"))
        store.plan = [Fault(Kind.ERROR, "list", error=PermissionDenied)]
        with pytest.raises(PermissionDenied):
            await Node(time, store, "waiter").lease.wait(KEY, nothing, 600)

    run(test)


# ---- keeping -------------------------------------------------------------------------------------------------


def test_a_holder_that_was_stopped_finds_out(store: FaultyStore, said: list[str]) -> None:
    async def test(time: Time) -> None:
        stopped, other = Node(time, store, "stopped"), Node(time, store, "other")
        lease = await take(stopped)
        replacing = await other.lease.acquire(KEY, nothing, 600)
        assert isinstance(replacing, Lease)
        before = store.count("publish")
        await lease.keep()  # goes on now, and ends by itself
        assert "another node considers this builder dead" in lease.lost_reason
        assert said == ["took over the environment build of stopped, which is gone", lease.lost_reason]
        assert store.count("publish") == before, "it does not beat any more"
        assert not await lease.release()
        assert await list_leases(store, KEY) == [replacing.number]

    run(test)


def test_what_it_says_is_seen(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        async with asyncio.TaskGroup() as group:
            lease, _ = await building(group, Node(time, store, "builder"))
            lease.tell("pip install\n-r requirements.txt")
            end_s = time.now_s + 3 * BEAT_S
            await time.until(lambda: time.now_s > end_s)
            holder = await Node(time, store, "waiter").lease.try_take(KEY)
            assert isinstance(holder, LeaseHolder)
            assert (holder.owner, holder.state) == ("builder", "pip install -r requirements.txt")
            assert 2 * BEAT_S <= holder.since_s <= 3 * BEAT_S
            await lease.release()

    run(test)


def test_heartbeats_are_as_many_as_they_should_be(store: FaultyStore) -> None:
    async def test(time: Time) -> None:
        async with asyncio.TaskGroup() as group:
            lease, task = await building(group, Node(time, store, "builder"))
            before, end_s = store.count("publish"), time.now_s + 100
            await time.until(lambda: time.now_s >= end_s)
            assert 18 <= store.count("publish") - before <= 20
            await lease.release()
            await task
            ended = store.count("publish")
            await time.until(lambda: time.now_s > end_s + 50)
            assert store.count("publish") == ended

    run(test)


@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.LOST])
def test_giving_back_survives_hiccups(store: FaultyStore, said: list[str], kind: Kind) -> None:
    async def test(time: Time) -> None:
        lease = await take(Node(time, store, "builder"))
        store.plan = [Fault(kind, "publish", calls=range(2))]
        assert await lease.release()
        store.plan = [Fault(Kind.ERROR, "publish", calls=range(9), error=StorageError)]
        node = Node(time, store, "next")
        with pytest.raises(StorageError):
            await node.lease.try_take(KEY)
        store.plan = []
        second = await take(node)
        store.plan = [Fault(Kind.ERROR, "publish", error=StorageError)]
        assert not await second.release()
        assert "other nodes detect it" in said[-1]

    run(test)


Step = Callable[[Time], Awaitable[None]]


@settings(deadline=None)
@given(st.lists(st.sampled_from(["beat", "stop", "look", "hiccup"]), min_size=1, max_size=30), st.integers(2, 4))
def test_whatever_happens_somebody_gets_it(script: list[str], nodes: int) -> None:
    """In any order of stops and hiccups one of the nodes ends with the lease, and only the highest counts."""
    name = f"lease{next(numbers)}"
    store = FaultyStore(open_store(f"memory://{name}/envs"))

    async def test(time: Time) -> None:
        holder = await take(Node(time, store, "node0"))
        others = [Node(time, store, f"node{number}") for number in range(1, nodes)]
        for step in script:
            if step == "beat":
                await store.publish(f"keys/{KEY}/lease-{holder.number:06d}.json", holder.next_record(WORKING))
            elif step == "hiccup":
                store.plan = [Fault(Kind.ERROR, "list", calls=[0], error=Unavailable)]
            elif step == "look":
                with contextlib.suppress(Unavailable):
                    assert await others[0].lease.look(KEY) is not None
                store.plan = []
            end_s = time.now_s + (12.0 if step == "stop" else 1.0)
            await time.until(lambda end_s=end_s: time.now_s >= end_s)
        store.plan = []
        found = await others[-1].lease.acquire(KEY, nothing, 600)
        assert isinstance(found, Lease)
        assert (await list_leases(store, KEY))[-1] == found.number
        assert not await holder.release()

    try:
        run(test)
    finally:
        forget(name)
