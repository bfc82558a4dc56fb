"""Blocks of older versions: copied, not fetched; never wrong; let go when they are in the way."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path

import pytest

from bootseer.blocks.cache import Cache
from bootseer.blocks.dedup_sources import DedupSources
from bootseer.blocks.device import open_device
from bootseer.blocks.fetch import BlockFetcher
from bootseer.tree.index import BLOCK_BYTES
from tests.unit.bootseer.blocks.trees import Tree, fill_all, make_raw, make_store, make_tree, open_cache, open_root

SHARED = [make_raw(("shared", n), is_short=n % 4 == 3) for n in range(10)]
OLD = make_tree([*SHARED, *(make_raw(("old", n)) for n in range(3))], source="old")
NEW = make_tree([make_raw("new first"), *reversed(SHARED), make_raw("new last")], source="new")


@pytest.fixture
def root(tmp_path: Path) -> Cache:
    return open_root(tmp_path)


def put(root: Cache, tree: Tree, *, age_s: int = 0) -> None:
    with open_cache(root, tree) as cache:
        fill_all(cache, tree)
    lock = os.path.join(root.folder, "trees", tree.digest, "lock")
    used_s = os.stat(lock).st_mtime - age_s
    os.utime(lock, (used_s, used_s))


def fetch_new(root: Cache) -> tuple[dict[str, float], int]:
    """Brings all of NEW; what it cost, and the bytes that the store was asked for."""
    store = make_store(NEW)

    async def main() -> dict[str, float]:
        with open_cache(root, NEW) as cache:
            fetcher = BlockFetcher(
                NEW.index, cache, [store], dedup_sources=DedupSources(root, NEW.digest, NEW.index)
            )
            await fetcher.ensure(range(NEW.count))
            for number, raw in enumerate(NEW.raws):
                assert cache.try_read_block(number, len(raw)) == raw
            await fetcher.aclose()
            return fetcher.statistics()

    statistics = asyncio.run(main())
    assert root.collect(0).left_bytes == 0  # nobody holds a tree any more
    return statistics, sum(call.length for call in store.calls)


def test_a_new_version_fetches_what_is_new(root: Cache) -> None:
    put(root, OLD)
    statistics, asked = fetch_new(root)
    assert statistics["donated_blocks"] == 10
    assert asked == NEW.index.block(0).stored_bytes + NEW.index.block(11).stored_bytes


def test_without_older_versions_all_is_fetched(root: Cache) -> None:
    statistics, asked = fetch_new(root)
    assert (statistics["donated_blocks"], asked) == (0, NEW.index.stored_bytes)


def test_damaged_blocks_of_others_are_fetched(root: Cache) -> None:
    put(root, OLD)
    with open(Path(root.folder) / "trees" / OLD.digest / "data", "r+b") as file:
        for number in (2, 5):
            file.seek(number * BLOCK_BYTES + 1000)
            file.write(b"!")
    statistics, _ = fetch_new(root)
    assert statistics["donated_blocks"] == 8


def test_what_others_lack_is_fetched(root: Cache) -> None:
    with open_cache(root, OLD) as cache:
        for number in (1, 2, 11):
            cache.fill(number, OLD.raws[number])
    statistics, _ = fetch_new(root)
    assert statistics["donated_blocks"] == 2


def test_an_index_that_is_damaged_or_gone_gives_nothing(root: Cache) -> None:
    put(root, OLD)
    index = Path(root.folder) / "trees" / OLD.digest / "index"
    index.write_bytes(NEW.data)
    assert fetch_new(root)[0]["donated_blocks"] == 0
    put(root, OLD)
    index.unlink()
    assert fetch_new(root)[0]["donated_blocks"] == 0


def test_few_trees_are_looked_at_the_latest_first(root: Cache) -> None:
    put(root, OLD, age_s=100)
    for age in range(3):
        put(root, make_tree([make_raw(("other", age))]), age_s=age)
    dedup_sources = DedupSources(root, NEW.digest, NEW.index)
    dedup_sources.build()
    assert not any(dedup_sources.has(number) for number in range(NEW.count))
    dedup_sources.close()
    dedup_sources = DedupSources(root, NEW.digest, NEW.index, max_trees=4)
    dedup_sources.build()
    assert [number for number in range(NEW.count) if dedup_sources.has(number)] == list(range(1, 11))
    assert dedup_sources.try_read(1, len(NEW.raws[1])) == NEW.raws[1]
    assert dedup_sources.try_read(0, 10) is None
    assert root.collect(0).left_bytes > 0  # it is in use
    dedup_sources.close()
    assert dedup_sources.try_read(1, 10) is None
    assert root.collect(0).left_bytes == 0


def test_a_donor_gets_no_younger(root: Cache) -> None:
    put(root, OLD, age_s=100)
    put(root, make_tree([make_raw("other")], source="other"), age_s=50)
    used_s = [tree.used_s for tree in root.trees()]
    dedup_sources = DedupSources(root, NEW.digest, NEW.index)
    dedup_sources.build()
    assert dedup_sources.has(1)
    dedup_sources.close()
    assert [tree.used_s for tree in root.trees()] == used_s


def test_what_is_let_go_while_it_is_being_built_is_let_go(root: Cache) -> None:
    put(root, OLD)
    dedup_sources = DedupSources(root, NEW.digest, NEW.index)
    dedup_sources.close()
    dedup_sources.build()
    assert not dedup_sources.has(1)
    assert root.collect(0).left_bytes == 0


def test_a_mount_without_a_trace_has_them_too(root: Cache) -> None:
    put(root, OLD)
    store = make_store(NEW)

    async def main() -> None:
        with open_cache(root, NEW) as cache:
            fetcher = BlockFetcher(
                NEW.index, cache, [store], dedup_sources=DedupSources(root, NEW.digest, NEW.index)
            )
            async with open_device(fetcher) as device:
                await fetcher.prepare()
                answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
                device.read_later(BLOCK_BYTES, 4096, answer.set_result)
                assert await answer == NEW.raws[1][:4096]
            await fetcher.aclose()

    asyncio.run(main())
    assert not store.calls


def test_trees_that_give_nothing_are_not_held(root: Cache) -> None:
    put(root, make_tree([make_raw("other")]))
    dedup_sources = DedupSources(root, NEW.digest, NEW.index)
    dedup_sources.build()
    assert root.collect(0).left_bytes == 0
    dedup_sources.close()


def test_a_disk_that_fails_costs_only_donations(
    root: Cache, monkeypatch: pytest.MonkeyPatch, said: list[str]
) -> None:
    """An error of the system at any other tree must not end the readers of this one."""
    put(root, OLD)

    def fail() -> list[object]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(root, "trees", fail)
    dedup_sources = DedupSources(root, NEW.digest, NEW.index)
    dedup_sources.build()
    assert dedup_sources.is_built and not any(dedup_sources.has(number) for number in range(NEW.count))
    assert said == ["no blocks are taken from other trees: [Errno 24] Too many open files"]
    dedup_sources.close()
