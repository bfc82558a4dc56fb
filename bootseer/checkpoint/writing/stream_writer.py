"""Writes one file of a version from a stream of unknown length.

Units are cut as bytes arrive. Unit i goes to stripe file i mod K, which is created with its first unit. A stream
cannot be read again: a permanent failure of the store ends it (HDFS and object stores repair their parts
themselves).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from bootseer import aio
from bootseer.checkpoint.io.unit_buffers import UnitBuffers
from bootseer.crc import crc32c
from bootseer.storage.protocol import Store

WAITING = 1  # full units that wait for their stripe's writer


class WrittenStream(NamedTuple):
    size: int  # bytes
    stripes: list[str]  # names
    stripe_sizes: list[int]  # bytes
    sums: list[int]


class _Unit(NamedTuple):
    number: int
    buffer: memoryview
    length: int


class StreamWriter:
    """Writes one stream; call `run` once."""

    def __init__(
        self,
        store: Store,
        paths: Callable[[int], tuple[str, str, int]],
        stripes: int,
        unit_bytes: int,
        buffers: UnitBuffers,
        progress: Callable[[int], None],
        leaving: Callable[[int, int, memoryview], AbstractAsyncContextManager[None]],
    ) -> None:
        """Args:
        paths: for a stripe's number, its name, its path in the store, and its placement.
        leaving: for the unit size, a unit's number and its bytes; entered while they are written.
        """
        self._store = store
        self._paths = paths
        self._max_stripes = stripes
        self._unit_bytes = unit_bytes
        self._buffers = buffers
        self._progress = progress
        self._leaving = leaving
        self._queues: list[asyncio.Queue[_Unit | None]] = []
        self._held: dict[int, memoryview] = {}  # buffers taken by this stream
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._sums: list[int] = []

    async def run(self, chunks: AsyncIterator[bytes | memoryview]) -> WrittenStream:
        """Write the stream. Raises the first error; nothing of the stream is visible then."""
        try:
            async with aio.TaskGroup() as group:
                await self._feed(chunks, group)
        finally:
            for buffer in self._held.values():
                self._buffers.give_back(buffer)
            self._held.clear()
        return WrittenStream(sum(self._sizes), self._names, self._sizes, self._sums)

    async def _feed(self, chunks: AsyncIterator[bytes | memoryview], group: asyncio.TaskGroup) -> None:
        buffer: memoryview | None = None
        filled = 0
        async for chunk in chunks:
            view = memoryview(chunk).cast("B") if len(chunk) else memoryview(b"")
            while len(view):
                if buffer is None:
                    buffer, filled = await self._take(), 0
                part = view[: self._unit_bytes - filled]
                buffer[filled : filled + len(part)] = part
                filled += len(part)
                view = view[len(part) :]
                if filled == self._unit_bytes:
                    await self._send(buffer, filled, group)
                    buffer = None
        if buffer is not None:
            await self._send(buffer, filled, group)
        if not self._queues:
            self._begin_stripe(group)  # an empty file has a stripe as well
        for queue in self._queues:
            await queue.put(None)

    async def _send(self, buffer: memoryview, length: int, group: asyncio.TaskGroup) -> None:
        unit = _Unit(len(self._sums), buffer, length)
        stripe = len(self._sums) % self._max_stripes
        if stripe == len(self._queues):
            self._begin_stripe(group)
        self._sums.append(await aio.run_io(crc32c, unit.buffer[: unit.length]))
        await self._queues[stripe].put(unit)

    def _begin_stripe(self, group: asyncio.TaskGroup) -> None:
        stripe = len(self._queues)
        self._queues.append(asyncio.Queue(WAITING))
        name, path, placement = self._paths(stripe)
        self._names.append(name)
        self._sizes.append(0)
        group.create_task(self._drain(stripe, path, placement))

    async def _drain(self, stripe: int, path: str, placement: int) -> None:
        async with self._store.create(path, placement=placement) as writer:
            while (unit := await self._queues[stripe].get()) is not None:
                view = unit.buffer[: unit.length]
                async with self._leaving(self._unit_bytes, unit.number, view):
                    await writer.write(view)
                self._give_back(unit.buffer)
                self._sizes[stripe] += unit.length
                self._progress(unit.length)

    async def _take(self) -> memoryview:
        buffer = await self._buffers.take()
        self._held[id(buffer)] = buffer
        return buffer

    def _give_back(self, buffer: memoryview) -> None:
        del self._held[id(buffer)]
        self._buffers.give_back(buffer)
