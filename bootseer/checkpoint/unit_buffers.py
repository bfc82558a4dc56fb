"""Memory and places for what is being written: units of a bounded number of bytes, a bounded number of open files.

Buffers are used again and again: memory that was never touched costs more than the copy into it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bootseer.checkpoint.memory import allocate


class UnitBuffers:
    """Buffers of one unit each, of at most `most_bytes` in all; of two units at least."""

    def __init__(self, unit_bytes: int, most_bytes: int) -> None:
        self._unit_bytes = unit_bytes
        self._room = asyncio.Semaphore(max(2, most_bytes // unit_bytes))
        self._free: list[memoryview] = []

    async def take(self) -> memoryview:
        """Waits until there is one. It is the caller's until `give_back`."""
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


class Places:
    """So many of something at once; who takes several gets all of them, in turn."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._free = asyncio.Semaphore(most)
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def taken(self, count: int) -> AsyncIterator[None]:
        count = min(count, self._most)
        taken = 0
        try:
            async with self._turn:  # else two could wait for each other, each with a part
                while taken < count:
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()
