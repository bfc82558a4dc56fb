"""Bounds for writes: memory for units, and the number of open files.

Buffers are reused: the first touch of new memory costs more than the copy into it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bootseer.checkpoint.io.memory import allocate


class UnitBuffers:
    """Buffers of one unit each, at most `max_bytes` in total, but at least two units."""

    def __init__(self, unit_bytes: int, max_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self._room = asyncio.Semaphore(max(2, max_bytes // unit_bytes))
        self._free: list[memoryview] = []

    async def take(self) -> memoryview:
        """Wait for a buffer and return it. It is the caller's until `give_back`."""
        await self._room.acquire()
        try:
            return self._free.pop() if self._free else allocate(self._unit_bytes, "a unit to write")
        except BaseException:
            self._room.release()
            raise

    def give_back(self, buffer: memoryview) -> None:
        self._free.append(buffer)
        self._room.release()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[memoryview]:
        buffer = await self.take()
        try:
            yield buffer
        finally:
            self.give_back(buffer)


class FairSemaphore:
    """A semaphore with a fair queue; a caller that takes several places gets all of them."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = asyncio.Semaphore(most)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        count = min(count, self._most)
        taken = 0
        try:
            async with self._turn:  # otherwise two callers with a part each could wait for each other
                while taken < count:
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()
