"""A caller's memory while a thread fills it: it can be taken back from a thread that hangs.

For calls that cannot be cancelled (foreign clients, sockets, network file systems): the thread writes only through
a Landing, the caller closes it when it gives up, and from then on nothing of that memory changes any more.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

_SMALL_BYTES = 64 << 10  # up to here a plain copy; above it one that lets other threads run


class GivenUpError(Exception):
    """The caller has taken its memory back; ends the thread, nobody else sees it."""


class Landing:
    """Memory that is filled from its start. Threads use `land` and `receive`, the caller `have` and `close`."""

    def __init__(self, target: memoryview) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._is_closed = False
        self.have = 0  # bytes from the start that are right
        self.moved_s = time.monotonic()  # when the last bytes came

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def land(self, data: memoryview | bytes) -> None:
        """Appends; `data` must fit. Raises: GivenUpError."""
        end = self.have + len(data)
        if end > len(self._target):
            raise ValueError(f"{end} bytes for memory of {len(self._target)}")
        with self._lock:
            self._check()
            copy_bytes(self._target[self.have : end], data)
            self.have = end
        self.moved_s = time.monotonic()

    def receive(self, read_into: Callable[[memoryview], int], most_bytes: int) -> int:
        """Lets `read_into` write up to `most_bytes` and tell how many it wrote. Raises: GivenUpError.

        It must end soon after the caller made it end (shut its socket): until then `close` waits.
        """
        with self._lock:
            self._check()
            count = read_into(self._target[self.have : self.have + most_bytes])
            self.have += count
        self.moved_s = time.monotonic()
        return count

    def give_up(self) -> None:
        """Whoever is about to write ends instead."""
        self._is_closed = True

    async def close(self) -> None:
        """Takes the memory back. When it returns, or is cancelled, nothing writes to it any more."""
        import asyncio  # is there; those that copy without a loop start faster without it

        self._is_closed = True
        cancelled: asyncio.CancelledError | None = None
        while not self._lock.acquire(blocking=False):
            try:
                await asyncio.sleep(0.001)  # a copy takes as long; a socket that was shut as well
            except asyncio.CancelledError as error:
                cancelled = error
        self._lock.release()
        if cancelled is not None:
            raise cancelled

    def moved(self) -> float:
        """For `run_apart`: when the last bytes came."""
        return self.moved_s

    def _check(self) -> None:
        if self._is_closed:
            raise GivenUpError


def copy_bytes(target: memoryview, data: memoryview | bytes) -> None:
    """Copies into memory of the same length, without stopping other threads if it is much."""
    if len(target) <= _SMALL_BYTES or (isinstance(data, memoryview) and data.readonly):
        target[:] = data
        return
    source = data if isinstance(data, bytes) else address_of(data)
    ctypes.memmove(address_of(target), source, len(target))


def address_of(view: memoryview) -> int:
    """Where a writable view of at least one byte begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
