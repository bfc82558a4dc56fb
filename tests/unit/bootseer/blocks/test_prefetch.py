"""Running ahead: in order, without getting in the way, and without ever failing a start."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.backoff import Backoff
from bootseer.blocks import plan, prefetch
from bootseer.blocks.cache import Cache
from bootseer.blocks.dedup_sources import DedupSources
from bootseer.blocks.device import BLOCK_SHIFT, open_device
from bootseer.blocks.fetch import BlockFetcher
from bootseer.blocks.prefetch import Phase, Prefetcher
from bootseer.cache_folder import Limit
from bootseer.errors import NotFound, Unavailable
from tests.testing.faulty_store import Fault, FaultyStore, Kind
from tests.unit.bootseer.blocks.trees import assert_right, fill_all, make_store, make_tree, open_cache, open_root

TREE = make_tree(60, pack_bytes=1 << 20)
ALL = range(TREE.count)
HOT = [40, 3, 41, 42, 10, 11, 12, 5, 50, 51]


@pytest.fixture
def root(tmp_path: Path) -> Cache:
    return open_root(tmp_path)


def run(root: Cache, store: FaultyStore, use: Callable[[BlockFetcher], Awaitable[Any]], **options: Any) -> Any:
    async def main() -> Any:
        with open_cache(root, TREE) as cache:
            fetcher = BlockFetcher(TREE.index, cache, [store], **options)
            async with asyncio.timeout(30.0):
                result = await use(fetcher)
            await fetcher.aclose()
            return result

    return asyncio.run(main())


def test_hot_blocks_only(root: Cache) -> None:
    async def use(fetcher: BlockFetcher) -> None:
        prefetcher = Prefetcher(fetcher, HOT)
        assert prefetcher.phase is Phase.NEW
        await prefetcher.run()
        assert prefetcher.phase is Phase.DONE
        assert set(fetcher.cache.missing(ALL)) == set(ALL) - set(HOT)
        assert fetcher.statistics()["waits"] == 0
        assert fetcher.cache.statistics()["saves"] == 1

    run(root, make_store(TREE), use, max_gap_bytes=0)


def test_then_all_others(root: Cache) -> None:
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        await Prefetcher(fetcher, HOT, is_whole=True).run()
        assert fetcher.cache.missing(ALL) == []

    run(root, store, use)
    hot = {(TREE.index.pack_path(TREE.index.block(n).pack), TREE.index.block(n).offset) for n in HOT}
    first_cold = next(n for n, call in enumerate(store.calls) if (call.path, call.offset) not in hot)
    assert first_cold >= 4
    assert sum(call.length for call in store.calls[:first_cold]) < TREE.index.stored_bytes / 2


def test_of_an_unknown_order_blocks_near_a_demand_go_first(root: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "NEAR_BLOCKS", 8)
    store = make_store(TREE, latency_s=0.002)
    wanted = TREE.count - 12

    async def use(fetcher: BlockFetcher) -> None:
        prefetcher = Prefetcher(fetcher, ALL, is_guess=True, hot_width=1)
        prefetcher.note_demand(0)  # not begun yet
        task = asyncio.create_task(prefetcher.run())
        while not store.calls:
            await asyncio.sleep(0.001)
        prefetcher.note_demand(wanted)
        await task
        assert prefetcher.phase is Phase.DONE
        assert fetcher.cache.missing(ALL) == [wanted], "its reader fetches it"

    run(root, store, use, max_gap_bytes=0)
    order = [(call.path, call.offset) for call in store.calls]
    follower = TREE.index.block(wanted + 1)
    assert order.index((TREE.index.pack_path(follower.pack), follower.offset)) < 8


def test_what_is_there_is_not_fetched(root: Cache) -> None:
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        fill_all(fetcher.cache, TREE)
        await Prefetcher(fetcher, HOT, is_whole=True).run()

    run(root, store, use)
    assert not store.calls


def test_cold_blocks_wait_while_readers_wait(root: Cache) -> None:
    store = make_store(TREE, latency_s=0.002)

    async def use(fetcher: BlockFetcher) -> None:
        async with asyncio.TaskGroup() as group:
            prefetcher = Prefetcher(fetcher, is_whole=True, quiet_s=0.2, cold_width=1)
            with fetcher.waits.one():
                task = group.create_task(prefetcher.run())
                async with asyncio.timeout(5.0):
                    while prefetcher.phase is not Phase.COLD:
                        await asyncio.sleep(0.001)
                await asyncio.sleep(0.05)
                assert not store.calls
            ended_s = time.monotonic()
            while not store.calls:
                await asyncio.sleep(0.001)
            assert time.monotonic() - ended_s >= 0.19
            await task
        assert fetcher.cache.missing(ALL) == []

    run(root, store, use)


def test_cold_blocks_stop_when_a_reader_waits(root: Cache) -> None:
    store = make_store(TREE, latency_s=0.005)

    async def use(fetcher: BlockFetcher) -> None:
        async with asyncio.TaskGroup() as group:
            task = group.create_task(Prefetcher(fetcher, is_whole=True, quiet_s=0.01, cold_width=1).run())
            while not store.calls:
                await asyncio.sleep(0.001)
            with fetcher.waits.one():
                await asyncio.sleep(0.1)
                begun = len(store.calls)
                assert begun <= 2  # what was on its way
                await asyncio.sleep(0.1)
                assert len(store.calls) == begun < len(TREE.packs)
            await task
        assert fetcher.cache.missing(ALL) == []

    run(root, store, use)


@pytest.mark.parametrize("limits_hot", [False, True])
def test_blocks_keep_to_their_bandwidth(root: Cache, limits_hot: bool) -> None:
    async def use(fetcher: BlockFetcher) -> float:
        rate, hot = TREE.index.stored_bytes * 4, list(ALL) if limits_hot else ()
        begin_s = time.monotonic()
        await Prefetcher(fetcher, hot, is_whole=True, max_bytes_per_s=rate, limits_hot=limits_hot).run()
        return time.monotonic() - begin_s

    took_s = run(root, make_store(TREE), use)
    assert took_s >= 0.25 * (1 - 1.1 / len(TREE.packs))  # the last one is not waited for


def test_failures_that_pass_are_waited_out(root: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "PAUSES", Backoff(0.01, 30.0))
    store = make_store(TREE, Fault(Kind.ERROR, calls=range(6)))

    async def use(fetcher: BlockFetcher) -> None:
        prefetcher = Prefetcher(fetcher, HOT, hot_width=2)
        await prefetcher.run()
        assert prefetcher.phase is Phase.DONE

    run(root, store, use)


def test_a_store_that_fails_for_good_is_left_alone(
    root: Cache, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    monkeypatch.setattr(prefetch, "PAUSES", Backoff(0.001, 30.0))
    store = make_store(TREE, Fault(Kind.ERROR, error=NotFound))

    async def use(fetcher: BlockFetcher) -> None:
        prefetcher = Prefetcher(fetcher, [*HOT, *range(20, 40, 2)], is_whole=True)
        await prefetcher.run()
        assert prefetcher.phase is Phase.GIVEN_UP
        assert prefetcher.statistics()["failed_spans"] >= prefetch.MAX_FAILURES
        store.plan.clear()
        assert_right(await fetcher.read_now([3]), TREE)

    run(root, store, use)
    assert len(said) == 1
    assert "by plan" in said[0]


def test_one_bad_span_does_not_stop_the_rest(root: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "PAUSES", Backoff(0.001, 30.0))
    path = TREE.index.pack_path(1)
    store = make_store(TREE, Fault(Kind.ERROR, path=path, error=NotFound))

    async def use(fetcher: BlockFetcher) -> None:
        prefetcher = Prefetcher(fetcher, is_whole=True)
        await prefetcher.run()
        assert prefetcher.phase is Phase.DONE
        missing = fetcher.cache.missing(ALL)
        assert missing == [n for n in ALL if TREE.index.pack_path(TREE.index.block(n).pack) == path]

    run(root, store, use)


def test_without_room_nothing_is_fetched_ahead(tmp_path: Path, said: list[str]) -> None:
    root = open_root(tmp_path, limit=Limit(max_bytes=0))
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        prefetcher = Prefetcher(fetcher, ALL, hot_width=1)
        await prefetcher.run()
        assert prefetcher.phase is Phase.GIVEN_UP

    run(root, store, use)
    assert len(store.calls) == 1
    assert "limit" in said[0]


def test_it_can_be_cancelled_at_any_time(root: Cache) -> None:
    for after in range(0, 12, 3):
        store = make_store(TREE, Fault(Kind.ERROR, calls=[2], error=Unavailable), latency_s=0.002)

        async def use(fetcher: BlockFetcher, store: FaultyStore = store, after: int = after) -> None:
            prefetcher = Prefetcher(fetcher, HOT, is_whole=True)
            task = asyncio.ensure_future(prefetcher.run())
            while len(store.calls) < after:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert prefetcher.phase is Phase.CANCELLED
            assert not fetcher._in_flight
            assert store.under_way == 0
            assert_right(await fetcher.read(ALL), TREE)
            with open_cache(root, TREE) as other:
                assert all(other.try_lock(number) for number in ALL)

        run(root, store, use)
        root.collect(0)


def test_other_trees_are_let_go_at_the_end(root: Cache) -> None:
    other = make_tree([*TREE.raws[:20]], source="older")
    with open_cache(root, other) as cache:
        fill_all(cache, other)

    async def use(fetcher: BlockFetcher) -> None:
        await Prefetcher(fetcher, HOT, is_whole=True).run()
        assert root.collect(0).trees == 1
        assert fetcher.statistics()["donated_blocks"] == 20

    run(root, make_store(TREE), use, dedup_sources=DedupSources(root, TREE.digest, TREE.index))


def test_other_trees_still_give_after_the_hot_blocks(root: Cache) -> None:
    other = make_tree([*TREE.raws[:20]], source="older")
    with open_cache(root, other) as cache:
        fill_all(cache, other)
    store = make_store(TREE)

    async def use(fetcher: BlockFetcher) -> None:
        await Prefetcher(fetcher, HOT).run()
        assert fetcher.statistics()["donated_blocks"] == len([number for number in HOT if number < 20])
        assert root.collect(0).trees == 0, "it is in use"
        store.calls.clear()
        await fetcher.read(range(20))
        assert not store.calls
        await Prefetcher(fetcher, is_whole=True, quiet_s=0.0).run()
        assert fetcher.statistics()["donated_blocks"] == 20
        assert root.collect(0).trees == 1

    run(root, store, use, dedup_sources=DedupSources(root, TREE.digest, TREE.index), max_gap_bytes=0)


def test_a_store_that_fails_leaves_other_trees_in_use(root: Cache) -> None:
    other = make_tree([*TREE.raws[:20]], source="older")
    with open_cache(root, other) as cache:
        fill_all(cache, other)
    store = make_store(
        TREE, Fault(Kind.ERROR, path=TREE.index.pack_path(TREE.index.block(59).pack), error=NotFound)
    )

    async def use(fetcher: BlockFetcher) -> None:
        prefetcher = Prefetcher(fetcher, [*HOT, *range(20)], is_whole=True, quiet_s=0.0)
        await prefetcher.run()
        assert fetcher.cache.missing(ALL)
        assert root.collect(0).trees == 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefetch, "PAUSES", Backoff(0.001, 30.0))
        run(root, store, use, dedup_sources=DedupSources(root, TREE.digest, TREE.index))
    assert root.collect(0).trees == 2, "its end lets go of them"


def test_a_start_does_not_wait_for_what_was_recorded(tmp_path: Path) -> None:
    """The same start without and with a trace, over a link of 5 ms: the time in which it stood still."""
    tree = make_tree(240, pack_bytes=4 << 20)
    parts = [range(first, first + 5) for first in range(0, tree.count, 8)]
    random.Random(1).shuffle(parts)
    order = [number for part in parts for number in part]

    def start(name: str, hot: list[int]) -> dict[str, float]:
        async def main() -> dict[str, float]:
            store = make_store(tree, latency_s=0.005, rate=200e6)
            with open_cache(open_root(tmp_path / name), tree) as cache:
                fetcher = BlockFetcher(tree.index, cache, [store])
                async with asyncio.TaskGroup() as group, open_device(fetcher) as device:
                    task = group.create_task(Prefetcher(fetcher, hot).run())
                    for number in order:
                        target = memoryview(bytearray(65536))
                        if not device.try_read(number << BLOCK_SHIFT, target[: 32 << 10]):
                            waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
                            device.read_later(number << BLOCK_SHIFT, 32 << 10, waiter.set_result)
                            assert await waiter is not None
                        await asyncio.sleep(0.002)  # what it does with it
                    await task
                await fetcher.aclose()
                return fetcher.statistics()

        return asyncio.run(main())

    (tmp_path / "without").mkdir()
    (tmp_path / "with").mkdir()
    without, with_trace = start("without", []), start("with", order)
    print(f"blocked {without['blocked_s']:.3f} s and {with_trace['blocked_s']:.3f} s")
    assert without["blocked_s"] > len(order) * 0.005
    assert with_trace["blocked_s"] < without["blocked_s"] / 5  # measured: a fiftieth; the machine may be busy
    assert with_trace["requests"] < without["requests"] * 0.7
