"""Environment stores are alike wherever they are: leases, snapshots, trees, garbage collection."""

from __future__ import annotations

import asyncio
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.env.store.lease import BuilderLease, Lease, LeaseHolder, WaitEnded, WaitResult, list_leases, renewing
from bootseer.env.store.lease_record import DONE, FAILED, MAX_MISSED
from bootseer.env.store.store import EnvStore, PublishedSnapshot
from bootseer.errors import NotFound
from bootseer.storage import Store, open_store
from bootseer.storage.below import SubdirectoryStore
from tests.contract import servers
from tests.env_parts import (
    ADA,
    ADAS,
    NOW_S,
    build_into,
    document,
    make_snapshot,
    publish,
    put_raw,
    write_environment,
)
from tests.testing.store_suite import MakeStore, StoreSuite

BEAT_S = 0.15
PATIENT_S = 0.5  # of holders that live: MAX_MISSED of these pass on a loaded machine, too
KEY, DOCUMENT = document()

Make = Callable[[], Store]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of moto's own dependencies, while they are imported
        with servers.serve_s3() as url:
            yield url


class TestBelow(StoreSuite):
    """A folder of a store is a store."""

    @pytest.fixture
    def make_store(self, tmp_path: Path) -> MakeStore:
        (tmp_path / "some" / "folder").mkdir(parents=True)
        return lambda: SubdirectoryStore(open_store(str(tmp_path)), "some/folder")


@pytest.fixture(autouse=True)
def plain_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture(params=["local", "memory", "s3"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Stores of one place, each with connections of its own."""
    name = f"envs-{os.urandom(4).hex()}"
    if request.param == "local":
        yield lambda: open_store(str(tmp_path / "envs"))
    elif request.param == "memory":
        from bootseer.storage.memory import forget

        yield lambda: open_store(f"memory://{name}/envs")
        forget(name)
    else:
        yield from _bucket(request.getfixturevalue("endpoint"), name)


def _bucket(endpoint: str, name: str) -> Iterator[Make]:
    import boto3

    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=name)
    config = {"access_key_id": "x", "secret_access_key": "x", "region": "us-east-1", "endpoint": endpoint}
    options = {"config": config, "client_options": {"allow_http": True}}
    yield lambda: open_store(f"s3://{name}/some/envs", options=options)


@pytest.fixture
def stores(make: Make) -> Iterator[Make]:
    """The same, closed at the end."""
    made: list[Store] = []

    async def begin() -> Store:
        made.append(make())
        return made[-1]

    yield lambda: aio.run_sync(begin())
    for store in made:
        aio.run_sync(store.aclose())


@pytest.fixture
def leases(stores: Make) -> Callable[..., BuilderLease]:
    return lambda name, beat_s=BEAT_S: BuilderLease(stores(), owner=name, beat_s=beat_s)


@pytest.fixture
def env(stores: Make) -> EnvStore:
    store = stores()
    return EnvStore(store, store.url, ADAS)


async def nothing() -> None:
    return None


def take(of: BuilderLease) -> Lease:
    taken = aio.run_sync(of.try_take(KEY))
    assert isinstance(taken, Lease), taken
    return taken


# ---- leases --------------------------------------------------------------------------------------------------


def test_one_holder_at_a_time(leases: Callable[..., BuilderLease]) -> None:
    nodes = [leases(f"node{number}") for number in range(5)]

    async def all_at_once() -> list[object]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(node.try_take(KEY)) for node in nodes]
        return [task.result() for task in tasks]

    taken = aio.run_sync(all_at_once())
    (first,) = [each for each in taken if isinstance(each, Lease)]
    assert sum(isinstance(each, LeaseHolder) for each in taken) == 4
    assert aio.run_sync(first.release(DONE))
    second = take(nodes[0])
    assert second.number == first.number + 1
    assert aio.run_sync(nodes[1].try_take(KEY)).owner == "node0"  # type: ignore[union-attr]
    assert aio.run_sync(list_leases(nodes[0]._store, KEY)) == [second.number]


def test_a_holder_that_heartbeats_is_waited_for(leases: Callable[..., BuilderLease]) -> None:
    builder, waiter = leases("builder", PATIENT_S), leases("waiter", PATIENT_S)
    with renewing(take(builder)) as lease:
        lease.tell("pip install")
        began_s = time.monotonic()
        found = aio.run_sync(waiter.acquire(KEY, nothing, 8 * PATIENT_S))
        assert isinstance(found, WaitEnded), found
        assert time.monotonic() - began_s >= 8 * PATIENT_S
        holder = aio.run_sync(waiter.try_take(KEY))
        assert isinstance(holder, LeaseHolder)
        assert (holder.owner, holder.state) == ("builder", "pip install")
    assert isinstance(aio.run_sync(waiter.acquire(KEY, nothing, 60)), Lease)


def test_a_holder_that_died_is_replaced(leases: Callable[..., BuilderLease]) -> None:
    lost = take(leases("lost"))
    began_s = time.monotonic()
    found = aio.run_sync(leases("waiter").acquire(KEY, nothing, 60))
    assert isinstance(found, Lease)
    assert found.number == lost.number + 1
    assert time.monotonic() - began_s >= MAX_MISSED * BEAT_S
    aio.run_sync(lost.keep())  # ends by itself
    assert "considers this builder dead" in lost.lost_reason


def test_a_failure_is_reported_and_not_remembered(leases: Callable[..., BuilderLease]) -> None:
    builder, waiter = leases("builder", PATIENT_S), leases("waiter", PATIENT_S)
    lease = take(builder)
    searches = 0

    async def search() -> None:
        nonlocal searches
        searches += 1

    async def wait_and_fail() -> object:
        async with asyncio.TaskGroup() as group:
            keeping = group.create_task(lease.keep())
            waiting = group.create_task(waiter.acquire(KEY, search, 60))
            # The second search: it has seen the lease, and waits.
            while searches < 2 or not (await builder.look(KEY)).record.beat > 0:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
            await lease.release(FAILED, "status 1")
            await keeping
            return await waiting

    assert aio.run_sync(wait_and_fail()) == WaitEnded("builder failed to build the environment: status 1")
    take(waiter)


def test_code_that_fails_gives_the_lease_back(leases: Callable[..., BuilderLease]) -> None:
    builder = leases("builder")
    with pytest.raises(ZeroDivisionError), renewing(take(builder)):
        raise ZeroDivisionError
    seen = aio.run_sync(builder.look(KEY))
    assert seen is not None
    assert seen.record is not None
    assert (seen.record.state, seen.record.text) == (FAILED, "the builder ended with an error")


def test_ready_is_what_until_gave(leases: Callable[..., BuilderLease]) -> None:
    async def there() -> str:
        return "snapshot"

    assert aio.run_sync(leases("node").acquire(KEY, there, 5)) == WaitResult("snapshot")


# ---- snapshots -----------------------------------------------------------------------------------------------


def found(env: EnvStore, now_s: float = NOW_S, key: str = KEY) -> Any:
    return aio.run_sync(env.find(key, now_s))


def test_what_is_published_is_found_and_opened(
    env: EnvStore, stores: Make, tmp_path: Path, said: list[str]
) -> None:
    assert found(env) is None
    files = write_environment(tmp_path / "files")
    published = publish(env, files)
    assert isinstance(published, PublishedSnapshot)
    assert published.is_ours
    assert published.found.generation == 1
    assert published.found.because.startswith("signed by ada")
    other = EnvStore(stores(), env.url, ADAS)
    there = found(other)
    assert there == published.found
    opened = aio.run_sync(other.open(there.snapshot))
    assert opened.index.names[1] == b"0"
    assert opened.url == f"{env.url}/trees/{KEY}@sha256:{there.snapshot.tree}"
    blocks = dict(opened.blocks.read_blocks(range(opened.index.block_count)))
    assert b"VALUE = 'x'" in b"".join(blocks.values())
    done = aio.run_sync(other.verify(there))
    assert (done.faults, done.right_blocks) == ([], opened.index.block_count)
    (stored,) = aio.run_sync(other.documents(10))
    assert (stored.key, stored.data) == (KEY, DOCUMENT)
    (row,) = aio.run_sync(other.list(NOW_S))
    assert (row.key, row.found, row.refused) == (KEY, there, [])
    assert row.stored_bytes == opened.index.stored_bytes > 0
    assert said == []


def test_an_index_of_a_cache_is_verified(env: EnvStore, tmp_path: Path) -> None:
    snapshot = publish(env, write_environment(tmp_path / "files")).found.snapshot
    data = aio.run_sync(env.open(snapshot)).index_bytes
    for cached in (data, b"", data[:-1], None):
        opened = aio.run_sync(env.open(snapshot, cached=lambda _, cached=cached: cached))
        assert opened.index_bytes == data
    aio.run_sync(env.store.delete(f"trees/{KEY}/index"))
    assert aio.run_sync(env.open(snapshot, cached=lambda _: data)).digest == snapshot.tree
    with pytest.raises(NotFound):
        aio.run_sync(env.open(snapshot, cached=lambda _: b"other"))


def test_generations(env: EnvStore, tmp_path: Path, said: list[str]) -> None:
    """The highest one that is believed and not expired."""
    one, two, three = (write_environment(tmp_path / text, text) for text in ("one", "two", "three"))
    first = publish(env, one, expires_s=NOW_S + 10).found
    assert found(env, NOW_S + 9.9) == first
    assert found(env, NOW_S + 10) is None
    # Who comes too late gets what is there.
    late = publish(env, two)
    assert not late.is_ours
    assert late.found == first
    second = publish(env, two, created_s=NOW_S + 20, expires_s=NOW_S + 30).found
    assert second.generation == 2
    assert found(env, NOW_S + 20) == second
    # One that replaces a good one (--rebuild), and above it one that is of another key.
    third = publish(env, three, created_s=NOW_S + 21, replaces=2).found
    assert (third.generation, third.snapshot.expires_s) == (3, None)
    put_raw(env.store, KEY, make_snapshot("b" * 64, "a" * 64, 5), number=4)
    assert found(env, NOW_S + 40) == third
    assert "env-000004.json: is the snapshot of another key" in said[-1]
    assert publish(env, one, created_s=NOW_S + 40, replaces=3).found.generation == 5


def test_one_of_many_publishes(env: EnvStore, stores: Make, tmp_path: Path) -> None:
    nodes = [EnvStore(stores(), env.url, ADAS) for _ in range(4)]
    snapshots = []
    for number in range(4):
        built = build_into(env, KEY, write_environment(tmp_path / f"files{number}", f"node {number}"))
        snapshots.append((make_snapshot(KEY, built.digest, len(built.index_bytes)), built.index_bytes))

    async def all_at_once() -> list[Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(node.publish(snapshot, DOCUMENT, data, ADA))
                for node, (snapshot, data) in zip(nodes, snapshots, strict=True)
            ]
        return [task.result() for task in tasks]

    outcomes = aio.run_sync(all_at_once())
    assert sorted(each.is_ours for each in outcomes) == [False, False, False, True]
    assert len({each.found.snapshot.tree for each in outcomes}) == 1
    entries = aio.run_sync(env.store.list(f"keys/{KEY}"))
    assert [entry.name for entry in entries if entry.name.startswith("env-")] == ["env-000001.json"]


def test_stamps_are_touched_hourly(env: EnvStore, tmp_path: Path) -> None:
    publish(env, write_environment(tmp_path / "files"))
    now_s = time.time()
    first = found(env)
    assert first.used_s == 0
    aio.run_sync(env.touch(first, now_s))
    second = found(env)
    assert abs(second.used_s - now_s) < 60
    aio.run_sync(env.touch(second, second.used_s + 3599))
    assert found(env).used_s == second.used_s
    aio.run_sync(env.store.delete(f"keys/{KEY}/used"))
    aio.run_sync(env.touch(second, second.used_s + 3600))
    assert found(env).used_s >= second.used_s


async def no_pause(_: float, __: asyncio.Event) -> None:
    return None


def test_garbage_collection(env: EnvStore, tmp_path: Path) -> None:
    day_s, now_s = 86_400.0, time.time()
    old = publish(env, write_environment(tmp_path / "old", "old"), "old", created_s=now_s, expires_s=now_s + 5)
    good = publish(env, write_environment(tmp_path / "good", "good"), "good", created_s=now_s)
    held = publish(env, write_environment(tmp_path / "held", "held"), "held", created_s=now_s, expires_s=now_s + 5)
    keys = [each.found.snapshot.key for each in (old, good, held)]
    aio.run_sync(env.store.publish("notes/readme.txt", b"somebody's own"))
    aio.run_sync(env.store.publish(f"trees/{'f' * 64}/packs/{'e' * 64}", b"of a build that never ended"))
    aio.run_sync(env.store.publish(f"trees/{keys[1]}/packs/{'d' * 64}", b"left over"))

    def collect(later_s: float, max_bytes: int | None = None, **more: Any) -> Any:
        return aio.run_sync(env.gc(max_bytes, None, now_s + later_s, pause=no_pause, **more))

    assert collect(day_s - 60).removals == [], "a day of grace"
    lease = aio.run_sync(BuilderLease(env.store, owner="builder").try_take(keys[2]))
    assert isinstance(lease, Lease)

    async def heartbeats(_: float, __: asyncio.Event) -> None:
        path = f"keys/{keys[2]}/lease-{lease.number:06d}.json"
        await env.store.publish(path, lease.next_record("working"))

    later_s = day_s + 60
    planned = aio.run_sync(env.gc(None, None, now_s + later_s, is_dry=True, pause=heartbeats))
    assert found(env, now_s, keys[0]) is not None
    done = aio.run_sync(env.gc(None, None, now_s + later_s, pause=heartbeats))
    assert done == planned
    assert {(each.key, each.why) for each in done.removals} == {
        (keys[0], "has expired"),
        (keys[1], "no longer belongs to a snapshot"),
        ("f" * 64, "has no snapshot"),
    }
    assert done.leased == 1
    assert found(env, now_s, keys[0]) is None
    assert found(env, now_s, keys[1]) == good.found
    assert aio.run_sync(env.verify(good.found)).faults == []
    assert found(env, now_s, keys[2]) == held.found
    with pytest.raises(NotFound):
        aio.run_sync(env.open(old.found.snapshot))
    done = collect(later_s)  # the builder is silent now
    assert [(each.key, each.why) for each in done.removals] == [(keys[2], "has expired")]
    assert collect(later_s, 0).removals[0].key == keys[1]
    assert aio.run_sync(env.list(now_s)) == []
    left = aio.run_sync(env.store.list("notes"))
    assert [entry.name for entry in left] == ["readme.txt"], "what is not ours stays"
