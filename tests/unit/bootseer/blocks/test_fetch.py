"""Fetching blocks: each once, right or not at all, within the deadline, whoever else is at it."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bootseer.blocks import fetch
from bootseer.blocks.cache import Cache
from bootseer.blocks.fetch import BlockFetcher
from bootseer.cache_folder import Limit
from bootseer.errors import BootseerError, ConfigError, IntegrityError, NotFound, StorageTimeout, Unavailable
from bootseer.tree import compression
from bootseer.tree.index import BLOCK, Index
from tests.testing.faulty_store import Fault, FaultyStore, Kind
from tests.unit.bootseer.blocks.trees import Tree, assert_right, make_store, make_tree, open_cache, open_root

TREE = make_tree(24)
ALL = range(TREE.count)
DEADLINE_S = 0.6


@pytest.fixture
def root(tmp_path: Path) -> Cache:
    return open_root(tmp_path)


def run(root: Cache, use: Callable[[BlockFetcher], Awaitable[Any]], *stores: FaultyStore, **options: Any) -> Any:
    """What `use` gives, of a fetcher of TREE."""
    tree: Tree = options.pop("tree", TREE)

    async def main() -> Any:
        with open_cache(root, tree) as cache:
            fetcher = BlockFetcher(tree.index, cache, stores, **options)
            try:
                return await asyncio.wait_for(_await(use(fetcher)), 30.0)
            finally:
                await fetcher.aclose()
                assert not fetcher._in_flight

    return asyncio.run(main())


async def _await(it: Awaitable[Any]) -> Any:
    return await it


def read_bytes(store: FaultyStore) -> int:
    return sum(call.length for call in store.calls)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.001)


# ---- each once -----------------------------------------------------------------------------------------------


def test_blocks_are_read_once_and_kept(root: Cache) -> None:
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        assert_right(await fetcher.read([3, 1, 3, 2]), TREE)
        calls = len(store.calls)
        assert_right(await fetcher.read([1, 2, 3]), TREE)
        assert len(store.calls) == calls
        await fetcher.ensure(ALL)
        assert fetcher.cache.missing(ALL) == []
        statistics = fetcher.statistics()
        assert (statistics["demand_blocks"], statistics["prefetch_blocks"]) == (3, TREE.count - 3)

    run(root, use, store, max_gap_bytes=0)
    assert read_bytes(store) == TREE.index.stored_bytes
    run(root, lambda fetcher: fetcher.read(ALL), make_store(TREE, Fault(Kind.ERROR)))  # a second start


def test_neighbours_are_one_request(root: Cache) -> None:
    store = make_store(TREE)
    run(root, lambda fetcher: fetcher.ensure(ALL), store)
    assert len(store.calls) == len(TREE.packs)


def test_many_who_ask_at_once_cost_one_read(root: Cache) -> None:
    store = make_store(TREE, latency_s=0.02)

    async def use(fetcher: BlockFetcher) -> None:
        async with asyncio.TaskGroup() as group:
            reads = [group.create_task(fetcher.read_now([number % 6, 7])) for number in range(40)]
            group.create_task(fetcher.ensure(range(8)))
        for read in reads:
            assert_right(read.result(), TREE)
        statistics = fetcher.statistics()
        assert statistics["waits"] == 40
        assert 0.01 < statistics["blocked_s"] < 5.0

    run(root, use, store, max_gap_bytes=0)
    assert read_bytes(store) == sum(TREE.index.block(number).stored_bytes for number in range(8))


def test_demand_joins_what_is_on_its_way(root: Cache) -> None:
    store = make_store(TREE, latency_s=0.2)

    async def use(fetcher: BlockFetcher) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(fetcher.ensure(range(4)))
            await until(lambda: len(store.calls) == 1)
            assert_right(await fetcher.read_now([2]), TREE)
        assert fetcher.statistics()["joined"] == 1

    run(root, use, store)
    assert len(store.calls) == 1


def test_demand_does_not_wait_behind_prefetch(root: Cache) -> None:
    tree = make_tree(300)
    store = make_store(tree, latency_s=0.05)

    async def use(fetcher: BlockFetcher) -> None:
        async with asyncio.TaskGroup() as group:
            prefetches = [group.create_task(fetcher.ensure([number])) for number in range(0, 299, 2)]
            await until(lambda: store.under_way >= 8)
            assert_right(await fetcher.read_now([298, 299]), tree)  # 298 is far behind in the queue
            done = sum(prefetch.done() for prefetch in prefetches)
            assert done < 60, "it waited"

    run(root, use, store, tree=tree)


# ---- wrong, late, gone -----------------------------------------------------------------------------------------


def test_wrong_bytes_are_fetched_another_way(root: Cache) -> None:
    store = make_store(TREE, Fault(Kind.WRONG, attempts=[0], keep_bytes=1000))

    async def use(fetcher: BlockFetcher) -> None:
        assert_right(await fetcher.read(range(4)), TREE)
        assert fetcher.statistics()["wrong_blocks"] == 1

    run(root, use, store)
    assert [call.attempt for call in store.calls] == [0, 1]
    assert store.calls[1].length < store.calls[0].length  # only the wrong one


def test_blocks_that_stay_wrong_are_never_handed_out(root: Cache) -> None:
    path = TREE.index.pack_path(0)
    pack = bytearray(TREE.packs[path])
    pack[TREE.index.block(2).offset + 99] ^= 1
    store = make_store(TREE._replace(packs={**TREE.packs, path: bytes(pack)}))

    async def use(fetcher: BlockFetcher) -> None:
        for call in (fetcher.read, fetcher.read_now, fetcher.ensure):
            with pytest.raises(IntegrityError) as caught:
                await call([1, 2, 3])
            assert "block 2," in str(caught.value)
            assert path in str(caught.value)
            assert store.url in str(caught.value)
        assert fetcher.cache.missing(range(4)) == [0, 2]  # its neighbours are right
        assert_right(await fetcher.read([1, 3]), TREE)

    run(root, use, store, deadline_s=0.3)


def test_errors_that_pass_are_not_seen(root: Cache) -> None:
    store = make_store(TREE, Fault(Kind.ERROR, calls=range(3)))
    assert_right(run(root, lambda fetcher: fetcher.read(range(3)), store), TREE)


def test_all_who_wait_for_a_block_get_its_error(root: Cache) -> None:
    store = make_store(TREE, Fault(Kind.ERROR, error=NotFound), latency_s=0.01)

    async def use(fetcher: BlockFetcher) -> None:
        reads = [asyncio.ensure_future(fetcher.read_now([1])) for _ in range(5)]
        found = await asyncio.gather(*reads, return_exceptions=True)
        assert [type(error) for error in found] == [NotFound] * 5

    run(root, use, store, deadline_s=0.3)


def test_what_has_failed_for_long_is_not_waited_for_again(root: Cache) -> None:
    """Else a program that goes on after an error would stand still at each of its reads."""
    store = make_store(TREE, Fault(Kind.ERROR, error=NotFound))
    took: list[float] = []

    async def use(fetcher: BlockFetcher) -> None:
        for number in (1, 1, 2, 3):
            begin_s = time.monotonic()
            with pytest.raises(NotFound):
                await fetcher.read_now([number])
            took.append(time.monotonic() - begin_s)
        store.plan.clear()
        assert_right(await fetcher.read_now([1, 2]), TREE)

    run(root, use, store, deadline_s=1.0, again_s=0.1)
    assert took[0] >= 1.0
    assert max(took[1:]) < 0.9


def test_a_store_that_stalls_is_asked_another_way(root: Cache) -> None:
    store = make_store(TREE, Fault(Kind.STALL, attempts=[0]))
    begin_s = time.monotonic()
    assert_right(run(root, lambda fetcher: fetcher.read_now([1]), store, deadline_s=DEADLINE_S), TREE)
    assert time.monotonic() - begin_s < DEADLINE_S


def test_a_reader_gets_an_error_at_the_deadline(root: Cache) -> None:
    store = make_store(TREE, Fault(Kind.STALL))

    async def use(fetcher: BlockFetcher) -> None:
        async with asyncio.TaskGroup() as group:
            prefetch = group.create_task(fetcher.ensure([1]))
            await until(lambda: store.under_way == 1)
            begin_s = time.monotonic()
            with pytest.raises(StorageTimeout, match=TREE.index.pack_path(0)):
                await fetcher.read_now([1], since_s=begin_s - DEADLINE_S / 2)
            assert 0.2 < time.monotonic() - begin_s < DEADLINE_S
            prefetch.cancel()
        assert fetcher.statistics()["blocked_s"] >= DEADLINE_S * 0.9

    run(root, use, store, deadline_s=DEADLINE_S)


def test_a_reader_does_not_wait_long_for_a_prefetch_that_stalls(root: Cache) -> None:
    store = make_store(TREE, Fault(Kind.STALL, calls=[0]))

    async def use(fetcher: BlockFetcher) -> None:
        prefetch = asyncio.ensure_future(fetcher.ensure(range(4)))
        await until(lambda: store.under_way == 1)
        assert_right(await fetcher.read_now([1]), TREE)
        prefetch.cancel()
        await asyncio.wait({prefetch})

    run(root, use, store, deadline_s=DEADLINE_S)
    assert store.calls[1].attempt == 1  # another connection


def test_whoever_brings_a_block_may_be_cancelled(root: Cache) -> None:
    store = make_store(TREE, latency_s=0.05)

    async def use(fetcher: BlockFetcher) -> None:
        first = asyncio.ensure_future(fetcher.read([1]))
        await until(lambda: store.under_way == 1)
        second = asyncio.ensure_future(fetcher.read([1]))
        await asyncio.sleep(0)
        first.cancel()
        assert_right(await second, TREE)

    run(root, use, store)


# ---- several stores --------------------------------------------------------------------------------------------


def test_stores_are_asked_in_order(root: Cache) -> None:
    near = make_store(TREE)
    far = make_store(TREE)
    del near.inner.files[TREE.index.pack_path(1)]  # type: ignore[attr-defined]
    assert_right(run(root, lambda fetcher: fetcher.read(ALL), near, far), TREE)
    assert {call.path for call in far.calls} == {TREE.index.pack_path(1)}


def test_a_store_with_wrong_bytes_is_not_the_last_word(root: Cache) -> None:
    bad = make_store(TREE, Fault(Kind.WRONG))
    good = make_store(TREE)
    assert_right(run(root, lambda fetcher: fetcher.read(ALL), bad, good), TREE)


def test_a_store_that_failed_is_asked_last_for_a_while(root: Cache) -> None:
    bad = make_store(TREE, Fault(Kind.ERROR, error=IntegrityError))
    good = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        for number in (0, 8, 16):
            assert_right(await fetcher.read([number]), TREE)

    run(root, use, bad, good)
    assert len(bad.calls) == 2  # both ways, once
    assert len(good.calls) == 3


def test_without_a_store_there_is_an_error(root: Cache) -> None:
    with pytest.raises(ConfigError, match="no store"):
        run(root, lambda fetcher: fetcher.read([0]))


# ---- what a block may be ---------------------------------------------------------------------------------------


def lying_tree(raw_bytes: int, stored: bytes) -> Tree:
    """One block whose index says something else than it has."""
    blocks = BLOCK.pack(hashlib.sha256(stored).digest(), 0, 0, len(stored), raw_bytes)
    fields = {name: getattr(TREE.index, name) for name in TREE.index.__struct_fields__}
    index = Index(**{**fields, "blocks": blocks, "packs": [(hashlib.sha256(stored).digest(), len(stored))]})
    return TREE._replace(index=index, raws=[b"?"], packs={index.pack_path(0): stored})


@pytest.mark.parametrize(
    ("raw_bytes", "stored"),
    [
        (4096, compression.compress(bytes(1 << 30))),  # a bomb
        (4096, compression.compress(bytes(8192))),
        (8192, compression.compress(bytes(4096))),
        (4096, b"this is no frame"),
        (4096, compression.compress(b"x" * 4096) * 2),
        (4096, compression.compress(b"x" * 4096)[:-1]),
    ],
)
def test_a_block_that_is_not_what_the_index_says_is_an_error(root: Cache, raw_bytes: int, stored: bytes) -> None:
    tree = lying_tree(raw_bytes, stored)
    with pytest.raises(IntegrityError, match="block 0"):
        run(root, lambda fetcher: fetcher.read([0]), make_store(tree), tree=tree)
    with open_cache(root, tree) as cache:
        assert cache.missing([0]) == [0]


# ---- the cache -------------------------------------------------------------------------------------------------


def test_a_damaged_block_is_fetched_again(root: Cache) -> None:
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        await fetcher.ensure(ALL)
        calls = len(store.calls)
        with open(Path(root.folder) / "trees" / TREE.digest / "data", "r+b") as file:
            file.seek(5 * (128 << 10) + 77)
            file.write(b"?")
        assert_right(await fetcher.read(ALL), TREE)
        assert len(store.calls) == calls + 1
        assert fetcher.cache.missing(ALL) == []

    run(root, use, store)


def test_without_room_blocks_are_handed_out_all_the_same(tmp_path: Path) -> None:
    root = open_root(tmp_path, limit=Limit(max_bytes=0))
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        for _ in range(3):
            for number in ALL:
                assert_right(await fetcher.read_now([number]), TREE)
        assert fetcher.cache.missing(ALL) == list(ALL)

    run(root, use, store)
    assert read_bytes(store) == TREE.index.stored_bytes  # few are kept in memory


def test_what_is_kept_in_memory_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "RECENT_BLOCKS", 4)
    root = open_root(tmp_path, limit=Limit(max_bytes=0))
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        await fetcher.ensure(ALL)
        assert len(fetcher._recent) == 4
        assert_right(await fetcher.read(ALL), TREE)

    run(root, use, store)


def test_what_is_not_to_be_kept_is_not(root: Cache) -> None:
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        await fetcher.ensure([3])
        assert_right(await fetcher.read(range(6), keeps=False), TREE)
        assert fetcher.cache.missing(range(6)) == [0, 1, 2, 4, 5]

    run(root, use, store, max_gap_bytes=0)
    assert read_bytes(store) == sum(TREE.index.block(number).stored_bytes for number in range(6))


# ---- other processes -------------------------------------------------------------------------------------------


def test_a_block_that_another_process_fetches_is_waited_for(root: Cache) -> None:
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        with open_cache(root, TREE) as other:
            assert other.try_lock(1)
            read = asyncio.ensure_future(fetcher.read_now([1, 2]))
            await until(lambda: fetcher.statistics()["waited_for_others"] >= 3)
            assert not read.done()
            other.fill(1, TREE.raws[1])
            other.unlock(1)
            assert_right(await read, TREE)

    run(root, use, store, max_gap_bytes=0)
    assert read_bytes(store) == TREE.index.block(2).stored_bytes


def test_a_sandbox_who_dies_is_followed_by_a_waiter(root: Cache) -> None:
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        other = open_cache(root, TREE)
        assert other.try_lock(1)
        read = asyncio.ensure_future(fetcher.read_now([1]))
        await until(lambda: fetcher.statistics()["waited_for_others"] >= 2)
        other.close()
        begin_s = time.monotonic()
        assert_right(await read, TREE)
        assert time.monotonic() - begin_s < 1.0

    run(root, use, store)


def test_a_sandbox_who_does_nothing_is_passed_by(root: Cache) -> None:
    """As a process that was stopped."""
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        with open_cache(root, TREE) as other:
            assert other.try_lock(1)
            await fetcher.ensure([1])  # leaves it to the other
            assert fetcher.cache.missing([1]) == [1]
            assert_right(await fetcher.read_now([1]), TREE)
            assert_right(await fetcher.read([1]), TREE)
            assert len(store.calls) == 1

    run(root, use, store, deadline_s=DEADLINE_S)


# ---- whatever happens ------------------------------------------------------------------------------------------

PLANS = st.lists(
    st.builds(
        Fault,
        kind=st.sampled_from([Kind.ERROR, Kind.LOST, Kind.WRONG, Kind.CHANGED, Kind.STALL, Kind.DELAY]),
        path=st.sampled_from([*TREE.packs, "*"]),
        first=st.integers(0, 600_000),
        last=st.one_of(st.none(), st.integers(0, 600_000)),
        calls=st.one_of(st.none(), st.frozensets(st.integers(0, 5), max_size=3)),
        attempts=st.one_of(st.none(), st.frozensets(st.integers(0, 3), max_size=2)),
        keep_bytes=st.integers(0, 300_000),
        delay_s=st.floats(0.0, 0.05),
        error=st.sampled_from([Unavailable, NotFound]),
    ),
    max_size=3,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plan=PLANS, wants=st.lists(st.lists(st.sampled_from(ALL), min_size=1, max_size=8), min_size=1, max_size=6))
def test_bytes_are_right_or_there_is_an_error_in_time(
    tmp_path_factory: pytest.TempPathFactory, plan: list[Fault], wants: list[list[int]]
) -> None:
    store = make_store(TREE, *plan)

    async def use(fetcher: BlockFetcher) -> None:
        async def read(numbers: list[int]) -> None:
            begin_s = time.monotonic()
            try:
                assert_right(await fetcher.read_now(numbers), TREE)
            except BootseerError:
                pass
            assert time.monotonic() - begin_s < 0.4 + 2.0

        async with asyncio.TaskGroup() as group:
            prefetch = group.create_task(_quietly(fetcher.ensure(ALL)))
            await asyncio.wait([group.create_task(read(numbers)) for numbers in wants])
            prefetch.cancel()
        kept = set(ALL) - set(fetcher.cache.missing(ALL))
        for number in kept:
            assert fetcher.cache.try_read_block(number, len(TREE.raws[number])) == TREE.raws[number]
        store.plan.clear()
        assert_right(await fetcher.read(ALL), TREE)

    run(open_root(tmp_path_factory.mktemp("any")), use, store, deadline_s=0.4)


async def _quietly(coroutine: Coroutine[Any, Any, None]) -> None:
    try:
        await coroutine
    except BootseerError:
        pass
