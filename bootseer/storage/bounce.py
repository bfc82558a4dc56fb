"""Memory for bytes that cannot go straight to their place: a bounded number of buffers, used again and again.

They are kept because memory that was never touched costs more to fill than a copy does. For one event loop.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_PAGE_BYTES = 4096


class Buffer:
    """One buffer of a pool."""

    def __init__(self, size_bytes: int) -> None:
        # Private: after a fork the child's reads must not write into ours.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = memoryview(mmap.mmap(-1, size_bytes + _PAGE_BYTES, flags=flags))

    def view(self, offset: int, length: int) -> memoryview:
        """`length` bytes that lie in a page as those at `offset` of a file do: direct input needs that."""
        start = offset % _PAGE_BYTES
        return self._memory[start : start + length]


class BouncePool:
    """At most `buffers` buffers of `size_bytes`, made when first needed."""

    def __init__(self, size_bytes: int, buffers: int) -> None:
        self._size_bytes = size_bytes
        self._free: list[Buffer] = []
        self._made, self._most = 0, buffers
        self._places = asyncio.Semaphore(buffers)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Buffer]:
        """A buffer for the length of a block, when one is free. A pool is either leased from or taken from."""
        async with self._places:
            buffer = self.try_take()
            assert buffer is not None
            try:
                yield buffer
            finally:
                self.give_back(buffer)

    def try_take(self) -> Buffer | None:
        """A buffer if one is free now; to be given back."""
        if self._free:
            return self._free.pop()
        if self._made == self._most:
            return None
        self._made += 1
        return Buffer(self._size_bytes)

    def give_back(self, buffer: Buffer) -> None:
        self._free.append(buffer)
