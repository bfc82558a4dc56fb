"""A file of a checkpoint with Python's file interface: sequential reads are served from a read-ahead cache.

In: an open Source and a path. A few small reads fetch small blocks. Once reads continue in order, several windows
are kept in flight, so that even one unaware reader keeps all servers busy. Very large reads go straight into the
caller's memory.
"""

from __future__ import annotations

import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from bootseer.checkpoint.io.memory import allocate
from bootseer.checkpoint.io.source import Request, Source

BLOCK_BYTES = 256 << 10  # fetched for a read out of order
BLOCKS = 16  # kept: the head of a file, its end, and some in between
WINDOW_BYTES = 16 << 20  # fetched ahead
WINDOWS = 8  # in flight or in memory
STREAK_BYTES = 1 << 20  # read in order so far: from here on windows are fetched ahead
SKIP_BYTES = 256 << 10  # a step forward of so much still counts as in order
DIRECT_BYTES = WINDOW_BYTES * WINDOWS // 2  # one larger read bypasses windows and blocks


class CheckpointFile(io.RawIOBase):
    """Read-only. Threads may share it only for `readinto_at`."""

    def __init__(self, source: Source, path: str, on_close: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.name = path
        self.mode = "rb"
        self.size = source.files[path].size
        self._source = source
        self._path = path
        self._on_close = on_close
        self._at = 0
        self._expected = 0  # where the next read in order begins
        self._streak = 0  # bytes
        self._ahead = _Ahead(source, path, self.size)

    # ---- the usual ------------------------------------------------------------------------------------------

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        self._check_open()
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._check_open()
        if whence not in (io.SEEK_SET, io.SEEK_CUR, io.SEEK_END):
            raise ValueError(f"whence {whence}")
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError(f"{self._path}: seek to {base + offset}, before the start")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self.size - self._at)
        data = bytearray(left if size is None or size < 0 else min(size, left))
        self.readinto(data)
        return bytes(data)

    def readall(self) -> bytes:
        return self.read()

    def readinto(self, buffer: Any) -> int:
        self._check_open()
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self.size - self._at))
        if count:
            self._fill(self._at, target[:count])
            self._at += count
        return count

    def readinto_at(self, offset: int, buffer: Any) -> int:
        """Fill a buffer from an offset, independent of the position; return the number of bytes."""
        self._check_open()
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self.size - offset))
        self._source.read([Request(self._path, offset, target[:count])])
        return count

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._ahead.close()
            self._on_close()

    # ---- read paths -----------------------------------------------------------------------------------------

    def _fill(self, offset: int, target: memoryview) -> None:
        is_next = self._expected <= offset <= self._expected + SKIP_BYTES
        self._streak = self._streak + len(target) if is_next else len(target)
        self._expected = offset + len(target)
        if len(target) >= DIRECT_BYTES:
            self._source.read([Request(self._path, offset, target)])
        elif is_next and self._streak >= STREAK_BYTES:
            self._ahead.read(offset, target)
        elif len(target) >= BLOCK_BYTES:
            if not self._ahead.try_read(offset, target):
                self._source.read([Request(self._path, offset, target)])
        else:
            self._ahead.read_blocks(offset, target)

    def _check_open(self) -> None:
        if self.closed:
            raise ValueError(f"{self._path}: the file is closed")


class _Ahead:
    """The cache of one file: small blocks, and windows that threads fill."""

    def __init__(self, source: Source, path: str, size: int) -> None:
        self._source = source
        self._path = path
        self._size = size
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._windows: dict[int, Future[memoryview]] = {}
        self._spare: list[memoryview] = []
        self._pool: ThreadPoolExecutor | None = None

    def read(self, offset: int, target: memoryview) -> None:
        """Read from windows; later ones are in flight afterwards."""
        done = 0
        while done < len(target):
            index, within = divmod(offset + done, WINDOW_BYTES)
            window = self._want(index, index)
            for following in range(index + 1, index + WINDOWS):
                if following * WINDOW_BYTES < self._size:
                    self._want(following, index)
            count = min(len(target) - done, WINDOW_BYTES - within)
            target[done : done + count] = window.result()[within : within + count]
            done += count

    def try_read(self, offset: int, target: memoryview) -> bool:
        """Read only if all windows are present or in flight; return whether they were."""
        last = (offset + len(target) - 1) // WINDOW_BYTES
        if any(index not in self._windows for index in range(offset // WINDOW_BYTES, last + 1)):
            return False
        self.read(offset, target)
        return True

    def read_blocks(self, offset: int, target: memoryview) -> None:
        if self.try_read(offset, target):
            return
        done = 0
        while done < len(target):
            index, within = divmod(offset + done, BLOCK_BYTES)
            block = self._blocks.get(index)
            if block is None:
                data = bytearray(min(BLOCK_BYTES, self._size - index * BLOCK_BYTES))
                self._source.read([Request(self._path, index * BLOCK_BYTES, memoryview(data))])
                block = self._blocks[index] = bytes(data)
                if len(self._blocks) > BLOCKS:
                    self._blocks.popitem(last=False)
            else:
                self._blocks.move_to_end(index)
            part = block[within : within + len(target) - done]
            target[done : done + len(part)] = part
            done += len(part)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None and self._pid == os.getpid():
            pool.shutdown(wait=True, cancel_futures=True)
        self._windows.clear()
        self._blocks.clear()
        self._spare.clear()

    def _want(self, index: int, first: int) -> Future[memoryview]:
        """Return a window, present or in flight. Windows outside those from `first` on are evicted."""
        if self._pid != os.getpid():  # a forked child: threads and their results are the parent's
            self._windows.clear()
            self._spare.clear()
            self._pool, self._pid = None, os.getpid()
        window = self._windows.get(index)
        if window is not None and not (window.done() and window.exception() is not None):
            return window
        if self._pool is None:
            self._pool = ThreadPoolExecutor(WINDOWS, thread_name_prefix="checkpoint-ahead")
        while len(self._windows) >= WINDOWS:
            gone = self._windows.pop(next(each for each in self._windows if not first <= each < first + WINDOWS))
            if not gone.cancel() and gone.exception() is None:
                self._spare.append(gone.result())
        memory = self._spare.pop() if self._spare else allocate(min(WINDOW_BYTES, self._size))
        window = self._windows[index] = self._pool.submit(self._fetch, index, memory)
        return window

    def _fetch(self, index: int, memory: memoryview) -> memoryview:
        start = index * WINDOW_BYTES
        self._source.read([Request(self._path, start, memory[: min(WINDOW_BYTES, self._size - start)])])
        return memory
