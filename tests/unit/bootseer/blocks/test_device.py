"""The device that a mount shows, used as its server does: from a thread of its own."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.blocks.cache import Cache
from bootseer.blocks.device import BlockSource, CachedDevice, open_device
from bootseer.blocks.fetch import BlockFetcher
from bootseer.blocks.recorder import Recorder
from bootseer.errors import BootseerError, IntegrityError, NotFound
from bootseer.logs import sent_to
from bootseer.tree.index import BLOCK_BYTES
from tests.testing.faulty_store import Fault, FaultyStore, Kind
from tests.unit.bootseer.blocks.trees import make_store, make_tree, open_cache, open_root

TREE = make_tree(24)
DEVICE = TREE.device()


@pytest.fixture
def root(tmp_path: Path) -> Cache:
    return open_root(tmp_path)


class Reader:
    """Reads as the kernel does: at once if it can be, else it waits for the answer."""

    def __init__(self, device: CachedDevice) -> None:
        self.device = device
        self.later = 0

    def read(self, offset: int, length: int, *, deadline_s: float = 10.0) -> bytes | None:
        target = memoryview(bytearray(length))
        if self.device.try_read(offset, target):
            return bytes(target)
        self.later += 1
        answers: list[bytes | None] = []
        has_come = threading.Event()

        def done(data: memoryview | bytes | None) -> None:
            answers.append(None if data is None else bytes(data))
            has_come.set()

        self.device.read_later(offset, length, done)
        assert has_come.wait(deadline_s), "no answer"
        assert len(answers) == 1
        return answers[0]


def serve(
    root: Cache,
    store: FaultyStore,
    work: Callable[[Reader], Any],
    *,
    recorder: Recorder | None = None,
    **options: Any,
) -> tuple[Any, list[str]]:
    """Runs `work` in a thread; what it gives, and what was logged."""
    said: list[str] = []

    async def main() -> Any:
        with open_cache(root, TREE) as cache:
            fetcher = BlockFetcher(TREE.index, cache, [store], **options)
            async with open_device(fetcher, recorder=recorder) as device:
                assert device.size == len(DEVICE)
                result = await aio.run_abandonable(work, Reader(device), timeout_s=30.0)
            await fetcher.aclose()
            return result

    with sent_to(said.append):
        return asyncio.run(main()), said


def test_any_range_is_read_and_later_ones_at_once(root: Cache) -> None:
    store = make_store(TREE)
    chance = random.Random(1)
    ranges = [(chance.randrange(len(DEVICE) - 1), chance.randrange(1, 2 * BLOCK_BYTES)) for _ in range(80)]
    ranges += [(number * BLOCK_BYTES, BLOCK_BYTES) for number in range(TREE.count)]
    ranges = [(offset, min(length, len(DEVICE) - offset)) for offset, length in ranges]

    def work(reader: Reader) -> int:
        for offset, length in ranges:
            assert reader.read(offset, length) == DEVICE[offset : offset + length]
        first = reader.later
        for offset, length in ranges:
            assert reader.read(offset, length) == DEVICE[offset : offset + length]
        assert reader.later == first
        return first

    later, _ = serve(root, store, work)
    assert 10 < later <= TREE.count


def test_without_room_all_is_read_all_the_same(tmp_path: Path) -> None:
    from bootseer.cache_folder import Limit

    root = open_root(tmp_path, limit=Limit(max_bytes=0))

    def work(reader: Reader) -> None:
        for offset in range(0, len(DEVICE), 50_000):
            length = min(70_000, len(DEVICE) - offset)
            assert reader.read(offset, length) == DEVICE[offset : offset + length]

    serve(root, make_store(TREE), work)


def test_a_damaged_block_is_mended_on_the_way(root: Cache) -> None:
    def work(reader: Reader) -> None:
        assert reader.read(0, BLOCK_BYTES) == DEVICE[:BLOCK_BYTES]
        with open(Path(root.folder) / "trees" / TREE.digest / "data", "r+b") as file:
            file.seek(100)
            file.write(b"??")
        later = reader.later
        assert reader.read(0, 4096) == DEVICE[:4096]
        assert reader.later == later + 1
        assert reader.read(0, 4096) == DEVICE[:4096]
        assert reader.later == later + 1

    serve(root, make_store(TREE), work)


def test_errors_are_input_errors_and_reported(root: Cache) -> None:
    store = make_store(TREE, Fault(Kind.ERROR, error=NotFound))

    def work(reader: Reader) -> None:
        assert reader.read(0, 4096) is None
        assert reader.read(len(DEVICE), 1) is None
        assert reader.read(-4096, 4096) is None
        store.plan.clear()
        assert reader.read(0, 4096) == DEVICE[:4096]  # an error does not stay

    _, said = serve(root, store, work, deadline_s=0.3)
    assert len(said) == 3
    assert TREE.index.pack_path(0) in said[0]


def test_a_store_that_says_nothing_gives_an_input_error_in_time(root: Cache) -> None:
    store = make_store(TREE, Fault(Kind.STALL))

    def work(reader: Reader) -> float:
        begin_s = time.monotonic()
        assert reader.read(0, 4096) is None
        return time.monotonic() - begin_s

    took_s, said = serve(root, store, work, deadline_s=0.5)
    assert 0.3 < took_s < 3.0
    assert TREE.index.pack_path(0) in said[0]


def test_at_the_end_all_who_wait_get_an_answer(root: Cache) -> None:
    store = make_store(TREE, Fault(Kind.STALL))
    answers: list[object] = []

    async def main() -> None:
        with open_cache(root, TREE) as cache:
            fetcher = BlockFetcher(TREE.index, cache, [store])
            async with open_device(fetcher) as device:
                for number in range(5):
                    device.read_later(number * BLOCK_BYTES, 4096, answers.append)
                async with asyncio.timeout(5.0):
                    while not store.under_way:
                        await asyncio.sleep(0.001)
            assert answers == [None] * 5
            device.read_later(0, 4096, answers.append)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert answers == [None] * 6
        nonlocal late
        late = device

    late: CachedDevice | None = None
    asyncio.run(main())
    assert late is not None
    late.read_later(0, 4096, answers.append)  # the loop is closed
    assert answers == [None] * 7
    assert not late.try_read(0, memoryview(bytearray(10)))


def test_what_is_touched_is_recorded_in_order(root: Cache) -> None:
    recorder = Recorder(TREE.count)

    def work(reader: Reader) -> None:
        for number in (5, 3, 5, 9):
            reader.read(number * BLOCK_BYTES + 5000, 4096)
        reader.read(11 * BLOCK_BYTES - 10, 20)
        recorder.finish()
        reader.read(20 * BLOCK_BYTES, 4096)

    serve(root, make_store(TREE), work, recorder=recorder)
    trace = recorder.trace(TREE.digest)
    assert trace is not None
    assert trace.blocks == [5, 3, 9, 10, 11]
    assert trace.first_ms == sorted(trace.first_ms)


# ---- blocks for an unpacker ------------------------------------------------------------------------------------


def unpack(
    root: Cache, store: FaultyStore, work: Callable[[BlockSource], Any], *, keeps: bool
) -> tuple[Any, list[int]]:
    """Runs `work` in a thread; what it gives, and what the cache has then."""

    async def main() -> tuple[Any, list[int]]:
        with open_cache(root, TREE) as cache:
            fetcher = BlockFetcher(TREE.index, cache, [store])
            source = BlockSource(fetcher, asyncio.get_running_loop(), keeps=keeps)
            result = await aio.run_abandonable(work, source, timeout_s=30.0)
            await fetcher.aclose()
            return result, [number for number in range(TREE.count) if cache.has(number)]

    return asyncio.run(main())


@pytest.mark.parametrize("keeps", [True, False])
def test_blocks_come_in_the_order_in_which_they_were_asked_for(root: Cache, keeps: bool) -> None:
    order = [7, 3, 3, 0, 23, 7]

    def work(source: BlockSource) -> list[tuple[int, bytes]]:
        return [(number, bytes(raw)) for number, raw in source.read_blocks(iter(order))]

    found, kept = unpack(root, make_store(TREE), work, keeps=keeps)
    assert found == [(number, TREE.raws[number]) for number in order]
    assert kept == (sorted(set(order)) if keeps else [])


def test_all_blocks_of_a_tree(root: Cache) -> None:
    def work(source: BlockSource) -> None:
        for turn in range(30):  # more than are fetched ahead
            for number, raw in source.read_blocks(range(TREE.count)):
                assert raw == TREE.raws[number], turn

    store = make_store(TREE, latency_s=0.01)
    _, kept = unpack(root, store, work, keeps=True)
    assert kept == list(range(TREE.count))


def test_an_unpacker_may_stop_and_gets_errors(root: Cache) -> None:
    store = make_store(TREE)

    def work(source: BlockSource) -> None:
        blocks = source.read_blocks(range(TREE.count))
        assert next(blocks)[0] == 0
        blocks.close()  # type: ignore[attr-defined]
        del store.inner.files[TREE.index.pack_path(1)]  # type: ignore[attr-defined]
        with pytest.raises(BootseerError) as caught:
            list(source.read_blocks(range(TREE.count)))
        assert isinstance(caught.value, NotFound | IntegrityError)

    unpack(root, store, work, keeps=False)
