"""Memory for bytes that cannot go straight to their target: a bounded number of buffers that are reused.

Filling memory for the first time costs more than a copy, so the pool keeps its buffers. For one event loop.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PAGE_BYTES = 4096


class Buffer:
    def __init__(self, size_bytes: int) -> None:
        # Private: after a fork, reads of the child must not write into the parent's buffers.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = memoryview(mmap.mmap(-1, size_bytes + _PAGE_BYTES, flags=flags))

    def view(self, offset: int, length: int) -> memoryview:
        """Return `length` bytes with the page alignment of file offset `offset`, which direct I/O needs."""
        start = offset % _PAGE_BYTES
        return self._memory[start : start + length]


class BouncePool:
    """At most `buffers` buffers of `size_bytes`, allocated on demand."""

    def __init__(self, size_bytes: int, buffers: int) -> None:
        self._size_bytes = size_bytes
        self._free: list[Buffer] = []
        self._made, self._most = 0, buffers
        self._places = asyncio.Semaphore(buffers)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Buffer]:
        """Lend a buffer for the block; wait until one is free. Use a pool by leases or by `try_take`, not both."""
        async with self._places:
            buffer = self.try_take()
            assert buffer is not None
            try:
                yield buffer
            finally:
                self.give_back(buffer)

    def try_take(self) -> Buffer | None:
        """Return a buffer if one is free now. The caller gives it back."""
        if self._free:
            return self._free.pop()
        if self._made == self._most:
            return None
        buffer = Buffer(self._size_bytes)
        self._made += 1
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)
