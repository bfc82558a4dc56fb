"""Writers of one new HDFS file, which appears whole or not at all, even if DataNodes die meanwhile.

`PartsWriter` uploads parts (hdfs_uploads), joins them by concat and renames the result. Without WebHDFS there is
no concat: `StreamWriter` writes one stream by hdfs-native, and writes small files again after a failure.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any

from bootseer import aio
from bootseer.errors import AlreadyExists, NotFound, Truncated, Unavailable
from bootseer.storage.engine.revocable_buffer import copy_bytes
from bootseer.storage.hdfs.native import NativeHdfs
from bootseer.storage.hdfs.uploads import STALL_S, TEMPORARY, Uploads, pause_s

AT_ONCE = 2  # parts of one file: one is sent while the other waits for its acknowledgement
SMALL_BYTES = 1 << 20  # copied at once; larger ones in a thread
CONCAT_AT_ONCE = 16  # names in one request's URL


class PartsWriter:
    """Cuts its input into parts and uploads two at a time, in `tasks`."""

    def __init__(
        self, uploads: Uploads, tasks: asyncio.TaskGroup, folder: str, *, size: int | None, placement: int | None
    ) -> None:
        self._uploads = uploads
        self._tasks = tasks
        self._directory = folder
        self._placement = placement
        self._part_bytes = uploads.part_bytes(size)
        self._places = asyncio.Semaphore(AT_ONCE)
        self._spare: list[bytearray] = []
        self._buffer: bytearray | None = None
        self._filled = 0  # bytes of the buffer
        self._running: set[asyncio.Task[None]] = set()
        self._parts: list[str] = []
        self._size = 0

    async def write(self, data: memoryview | bytes) -> None:
        view = memoryview(data)
        if view.nbytes == 0:
            return
        view = view.cast("B")
        while len(view):
            if self._buffer is None:
                await self._places.acquire()
                self._buffer = self._spare.pop() if self._spare else bytearray(self._part_bytes)
                self._filled = 0
            count = min(len(view), self._part_bytes - self._filled)
            target = memoryview(self._buffer)[self._filled : self._filled + count]
            if count > SMALL_BYTES:
                await aio.run_io(copy_bytes, target, view[:count])
            else:
                target[:] = view[:count]
            self._filled += count
            view = view[count:]
            if self._filled == self._part_bytes:
                self._upload_buffer()

    async def commit(self, path: str, *, overwrite: bool) -> None:
        """Give the file its name."""
        await self._seal()
        await rename_whole(self._uploads, self._parts[0], path, overwrite=overwrite)
        self._parts = []

    async def abandon(self) -> None:
        """Delete all written data."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        parts, self._parts = self._parts, []
        for name in filter(None, parts):
            await self._uploads.discard(name)

    async def _seal(self) -> None:
        """Store everything under one temporary name."""
        if self._buffer is not None:
            self._upload_buffer()
        for _ in range(AT_ONCE):
            await self._places.acquire()
        if not self._parts:
            self._parts = [await self._uploads.upload(self._directory, b"", self._placement)]
        self._parts = [await join_parts(self._uploads, self._parts, self._size)]

    def _upload_buffer(self) -> None:
        assert self._buffer is not None
        self._parts.append("")
        self._size += self._filled
        part = self._upload(len(self._parts) - 1, self._buffer, self._filled)
        self._buffer = None
        task = self._tasks.create_task(part)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _upload(self, number: int, buffer: bytearray, length: int) -> None:
        data = memoryview(buffer)[:length]
        # Each part goes to the next DataNode: eight stripes on three of them would leave one with less load.
        placement = None if self._placement is None else self._placement + number
        self._parts[number] = await self._uploads.upload(self._directory, data, placement)
        self._spare.append(buffer)
        self._places.release()


class StreamWriter:
    """One file through hdfs-native, for clusters without WebHDFS. Small files are rewritten after a failure."""

    def __init__(self, uploads: Uploads, native: NativeHdfs, folder: str) -> None:
        self._uploads = uploads
        self._native = native
        self._directory = folder
        self._kept = bytearray()  # everything written, while it is small
        self._name = ""
        self._writer: Any = None
        self._size = 0
        self._is_sealed = False

    async def write(self, data: memoryview | bytes) -> None:
        if not len(data):
            return
        view = memoryview(data).cast("B")
        if self._size + len(view) <= self._uploads.part_bytes(None):
            self._kept += view
            self._size += len(view)
            return
        await self._begin()
        if self._kept:
            await self._native.write(self._writer, self._name, self._kept, STALL_S)
            self._kept = bytearray()
        await self._native.write(self._writer, self._name, view, STALL_S)
        self._size += len(view)

    async def commit(self, path: str, *, overwrite: bool) -> None:
        """Give the file its name."""
        await self.seal()
        await rename_whole(self._uploads, self._name, path, overwrite=overwrite)
        self._name = ""

    async def seal(self, *, tries_again: bool = True) -> None:
        """Store everything under a temporary name. Write kept data again after a failure."""
        if not self._is_sealed:
            if self._writer is None:
                await self._write_kept(tries_again)
            else:
                await self._end()
            self._uploads.written_bytes += self._size
            self._is_sealed = True

    async def abandon(self) -> None:
        """Delete all written data."""
        if self._name:
            await self._uploads.discard(self._name)
            self._name, self._writer = "", None

    async def _begin(self) -> None:
        if self._writer is None:
            self._name = f"{self._directory}/{TEMPORARY}{os.urandom(8).hex()}"
            options = self._uploads.options
            self._writer = await self._native.create(
                self._name, replication=options.replication, block_bytes=options.block_bytes
            )

    async def _end(self) -> None:
        # Closing waits for the acknowledgements of a whole queue of packets.
        await self._native.close(self._writer, self._name, 2 * STALL_S)
        status = await self._uploads.retried(lambda: self._uploads.names.status(self._name))
        if status.size != self._size:
            raise Truncated(f"{self._name} has {status.size} bytes, not the {self._size} that were sent")

    async def _write_kept(self, tries_again: bool) -> None:
        began_s = time.monotonic()
        tries = 0
        while True:
            try:
                await self._begin()
                if self._kept:
                    await self._native.write(self._writer, self._name, self._kept, STALL_S)
                await self._end()
                return
            except (Unavailable, Truncated):
                await self.abandon()
                if not tries_again or time.monotonic() - began_s > self._uploads.timeout_s:
                    raise
                self._uploads.retries += 1
                tries += 1
                await asyncio.sleep(pause_s(tries))


async def join_parts(uploads: Uploads, parts: list[str], size: int) -> str:
    """Join the parts to the first one and check its size. Return its name."""
    first, rest = parts[0], parts[1:]
    for start in range(0, len(rest), CONCAT_AT_ONCE):
        await _concat(uploads, first, rest[start : start + CONCAT_AT_ONCE])
    if rest:
        status = await uploads.retried(lambda: uploads.names.status(first))
        if status.size != size:
            raise Truncated(f"{first} has {status.size} bytes after it was joined from parts of {size}")
    return first


async def _concat(uploads: Uploads, first: str, sources: list[str]) -> None:
    # HDFS moves all or none: the last one stands for all.
    await _move(uploads, sources[-1], lambda: uploads.web.concat(first, sources))


async def rename_whole(uploads: Uploads, name: str, path: str, *, overwrite: bool) -> None:
    """Rename a temporary file; detect an earlier try that succeeded although its answer was lost."""
    await _move(uploads, name, lambda: uploads.names.rename(name, path, overwrite=overwrite))


async def _move(uploads: Uploads, name: str, call: Callable[[], Awaitable[None]]) -> None:
    """Retry a call that removes the file `name`, which no other process knows."""
    began_s = time.monotonic()
    tries = 0
    while True:
        try:
            await call()
            return
        except (NotFound, AlreadyExists):
            # If it is gone, an earlier try succeeded without its answer.
            if tries and not await _is_there(uploads, name):
                return
            raise
        except Unavailable:
            if time.monotonic() - began_s > uploads.timeout_s:
                raise
            tries += 1
            uploads.retries += 1
            await asyncio.sleep(pause_s(tries))


async def _is_there(uploads: Uploads, path: str) -> bool:
    try:
        await uploads.retried(lambda: uploads.names.status(path))
    except NotFound:
        return False
    return True
