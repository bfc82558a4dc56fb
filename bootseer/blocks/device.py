"""The cache as mounts and unpackers see it: a device that is usable at once, and blocks once they are fetched.

The thread that serves the kernel calls `CachedDevice`: a cached block needs no other thread, a missing one goes to
the event loop. `BlockSource` gives raw blocks to synchronous code and reads ahead.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from itertools import islice

from bootseer.blocks.fetch import BlockFetcher
from bootseer.blocks.recorder import Recorder
from bootseer.errors import BootseerError
from bootseer.logs import get_logger
from bootseer.tree.index import BLOCK_BYTES

_log = get_logger(__name__)

BLOCK_SHIFT = BLOCK_BYTES.bit_length() - 1
WINDOW_BLOCKS = 32  # of a BlockSource, requested together
WINDOWS = 8  # in flight at once

Done = Callable[[memoryview | bytes | None], None]
Failed = Callable[[range, BootseerError], object]
Waits = Callable[[range, float], object]
Missed = Callable[[range], object]
SLOW_S = 5.0  # after which a read is reported as slow


class CachedDevice:
    """The device of a tree, `size` bytes, for the thread that serves it. Made by `open_device`.

    It logs each read that fails; after that `failed` receives its blocks.
    """

    def __init__(
        self,
        fetcher: BlockFetcher,
        recorder: Recorder | None,
        group: asyncio.TaskGroup,
        failed: Failed,
        waits: Waits,
        missed: Missed,
    ) -> None:
        self.size = fetcher.cache.size
        self._fetcher, self._cache = fetcher, fetcher.cache
        self._recorder = Recorder(0) if recorder is None else recorder
        self._failed, self._waits, self._missed = failed, waits, missed
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._tasks: set[asyncio.Task[None]] = set()

    def try_read(self, offset: int, target: memoryview) -> bool:
        """Fill `target` from the cache; return False when bytes are missing or damaged: then `read_later`."""
        recorder = self._recorder
        if recorder.is_on:
            seen = recorder.seen
            first, last = offset >> BLOCK_SHIFT, (offset + len(target) - 1) >> BLOCK_SHIFT
            if not (seen[first] and seen[last]):
                recorder.touch(first, last)
        return self._cache.try_read(offset, target)

    def read_later(self, offset: int, length: int, done: Done) -> None:
        """Call `done` once, from any thread, with the bytes, or with None for an input error.

        It is called within the fetcher's deadline, even if the store does not respond. Thread-safe.
        """
        try:
            self._loop.call_soon_threadsafe(self._begin, offset, length, done, time.monotonic())
        except RuntimeError:
            done(None)  # the loop is closed

    def _begin(self, offset: int, length: int, done: Done, since_s: float) -> None:
        if not self._is_open:
            self._answer(done, None)
            return
        task = self._group.create_task(self._read(offset, length, done, since_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _read(self, offset: int, length: int, done: Done, since_s: float) -> None:
        data: memoryview | None = None
        blocks = range(offset >> BLOCK_SHIFT, ((offset + length - 1) >> BLOCK_SHIFT) + 1)
        slow = self._loop.call_later(SLOW_S, self._waits, blocks, SLOW_S)
        self._missed(blocks)
        try:
            data = await self._fetch(offset, length, since_s)
        except BootseerError as error:
            _log.info("a read fails: %s", error)
            self._failed(blocks, error)
        except Exception as error:  # a bug: it must not end the mount and all processes that use it
            _log.info("internal error while reading: %r", error)
        finally:
            slow.cancel()
            self._answer(done, data)

    def _answer(self, done: Done, data: memoryview | None) -> None:
        try:
            done(data)
        except Exception as error:
            _log.info("an answer is not taken: %r", error)

    async def _fetch(self, offset: int, length: int, since_s: float) -> memoryview:
        end = offset + length
        if offset < 0 or length < 1 or end > self.size:
            raise BootseerError(f"bytes {offset} to {end} of a device of {self.size}")
        first, last = offset >> BLOCK_SHIFT, (end - 1) >> BLOCK_SHIFT
        raws = await self._fetcher.read_now(range(first, last + 1), since_s=since_s)
        begin = offset - (first << BLOCK_SHIFT)
        if first == last and begin + length <= len(raws[first]):
            return raws[first][begin : begin + length]
        whole = bytearray((last + 1 - first) << BLOCK_SHIFT)  # the rest of a block is zeros
        for number, raw in raws.items():
            at = (number - first) << BLOCK_SHIFT
            whole[at : at + len(raw)] = raw
        return memoryview(whole)[begin : begin + length]

    def _close(self) -> None:
        self._is_open = False
        for task in self._tasks:
            task.cancel()


@asynccontextmanager
async def open_device(
    fetcher: BlockFetcher,
    *,
    recorder: Recorder | None = None,
    failed: Failed = lambda _numbers, _error: None,
    waits: Waits = lambda _numbers, _waited_s: None,
    missed: Missed = lambda _numbers: None,
) -> AsyncIterator[CachedDevice]:
    """Open the device of a tree on this event loop. On exit pending reads fail, and all later ones.

    `failed` receives the blocks of a read that is about to fail, `waits` those of a read that has waited for long,
    and `missed` those of each read that has to wait.
    """
    async with asyncio.TaskGroup() as group:
        device = CachedDevice(fetcher, recorder, group, failed, waits, missed)
        preparing = group.create_task(fetcher.prepare())
        try:
            yield device
        finally:
            preparing.cancel()
            device._close()


class BlockSource:
    """Raw blocks for synchronous code in another thread than that of `loop`, which runs `fetcher`.

    `keeps`: store fetched blocks in the cache; otherwise cached blocks are read there, others are not stored.
    """

    def __init__(self, fetcher: BlockFetcher, loop: asyncio.AbstractEventLoop, *, keeps: bool = True) -> None:
        self._fetcher, self._loop, self._keeps = fetcher, loop, keeps

    def read_blocks(self, numbers: Iterable[int]) -> Iterator[tuple[int, memoryview]]:
        """Yield (number, raw bytes of the block) in the order of `numbers`; fetch the next ones in the meantime.

        Raises: StorageError, IntegrityError.
        """
        rest = iter(numbers)
        ahead: deque[tuple[list[int], Future[dict[int, memoryview]]]] = deque()
        try:
            while True:
                while len(ahead) < WINDOWS and (window := list(islice(rest, WINDOW_BLOCKS))):
                    reading = self._fetcher.read(window, keeps=self._keeps)
                    ahead.append((window, asyncio.run_coroutine_threadsafe(reading, self._loop)))
                if not ahead:
                    return
                window, future = ahead.popleft()
                raws = future.result()
                for number in window:
                    yield number, raws[number]
        finally:
            for _, future in ahead:
                future.cancel()
