"""What mounts and unpackers see of the cache: a device that is there at once, and blocks when they have come.

`CachedDevice` is called by the thread that serves the kernel: what is cached costs it no other thread, what is not
is handed to the event loop. `BlockSource` gives raw blocks to plain code, reading ahead.
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
from bootseer.tree.index import BLOCK_BYTES

BLOCK_SHIFT = BLOCK_BYTES.bit_length() - 1
WINDOW_BLOCKS = 32  # of a BlockSource, asked for together
WINDOWS = 8  # on their way at once

Done = Callable[[memoryview | bytes | None], None]
Failed = Callable[[range, BootseerError], object]
Waits = Callable[[range, float], object]
SLOW_S = 5.0  # of a read, after which it is told that somebody waits for it


class CachedDevice:
    """The device of a tree, `size` bytes, for a thread that serves it. Made by `open_device`.

    `log` gets a line for each read that fails, from the event loop; before it `failed` is told of its blocks.
    """

    def __init__(
        self,
        fetcher: BlockFetcher,
        recorder: Recorder | None,
        log: Callable[[str], None],
        group: asyncio.TaskGroup,
        failed: Failed,
        waits: Waits,
    ) -> None:
        self.size = fetcher.cache.size
        self._fetcher, self._cache = fetcher, fetcher.cache
        self._recorder = Recorder(0) if recorder is None else recorder
        self._log, self._failed, self._waits = log, failed, waits
        self._group = group
        self._loop = asyncio.get_running_loop()
        self._is_open = True
        self._tasks: set[asyncio.Task[None]] = set()

    def try_read(self, offset: int, target: memoryview) -> bool:
        """Fills `target` from what is cached; False when something is missing or damaged: then `read_later`."""
        recorder = self._recorder
        if recorder.is_on:
            seen = recorder.seen
            first, last = offset >> BLOCK_SHIFT, (offset + len(target) - 1) >> BLOCK_SHIFT
            if not (seen[first] and seen[last]):
                recorder.touch(first, last)
        return self._cache.try_read(offset, target)

    def read_later(self, offset: int, length: int, done: Done) -> None:
        """Has `done` called once, from any thread: with the bytes, or with None for an input error.

        Within the fetcher's deadline, also when the store does not answer. Call it from any thread.
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
        try:
            data = await self._fetch(offset, length, since_s)
        except BootseerError as error:
            self._log(f"a read fails: {error}")
            self._failed(blocks, error)
        except Exception as error:  # a bug: it must not take the mount, and all that run on it, away
            self._log(f"a read fails by a mistake of ours: {error!r}")
        finally:
            slow.cancel()
            self._answer(done, data)

    def _answer(self, done: Done, data: memoryview | None) -> None:
        try:
            done(data)
        except Exception as error:
            self._log(f"an answer is not taken: {error!r}")

    async def _fetch(self, offset: int, length: int, since_s: float) -> memoryview:
        end = offset + length
        if offset < 0 or length < 1 or end > self.size:
            raise BootseerError(f"bytes {offset} to {end} of a device of {self.size}")
        first, last = offset >> BLOCK_SHIFT, (end - 1) >> BLOCK_SHIFT
        raws = await self._fetcher.read_now(range(first, last + 1), since_s=since_s)
        begin = offset - (first << BLOCK_SHIFT)
        if first == last and begin + length <= len(raws[first]):
            return raws[first][begin : begin + length]
        whole = bytearray((last + 1 - first) << BLOCK_SHIFT)  # what follows the data of a block is zeros
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
    log: Callable[[str], None] = lambda _: None,
    failed: Failed = lambda _numbers, _error: None,
    waits: Waits = lambda _numbers, _waited_s: None,
) -> AsyncIterator[CachedDevice]:
    """The device of a tree, on this event loop. At the end reads that wait fail, and all later ones.

    `failed` is told of blocks whose reader is about to get an error, `waits` of those whose reader waits for long.
    """
    async with asyncio.TaskGroup() as group:
        device = CachedDevice(fetcher, recorder, log, group, failed, waits)
        preparing = group.create_task(fetcher.prepare())
        try:
            yield device
        finally:
            preparing.cancel()
            device._close()


class BlockSource:
    """Raw blocks for plain code in another thread than that of `loop`, on which `fetcher` lives.

    `keeps`: whether the cache has them then; else they come from it if it has them, and are forgotten otherwise.
    """

    def __init__(self, fetcher: BlockFetcher, loop: asyncio.AbstractEventLoop, *, keeps: bool = True) -> None:
        self._fetcher, self._loop, self._keeps = fetcher, loop, keeps

    def read_blocks(self, numbers: Iterable[int]) -> Iterator[tuple[int, memoryview]]:
        """(number, raw bytes of the block) in the order of `numbers`; the next ones are fetched meanwhile.

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
