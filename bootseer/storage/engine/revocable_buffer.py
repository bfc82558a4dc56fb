"""A caller's memory while a thread fills it; the caller can revoke it from a hanging thread.

For calls that cannot be cancelled (foreign clients, sockets, network file systems). The thread writes only through
a Landing. The caller closes it when it gives up; from then on nothing changes that memory.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

_SMALL_BYTES = 64 << 10  # up to here a plain copy; above it a copy that lets other threads run


class BufferRevokedError(Exception):
    """The caller has revoked its memory; ends the thread, and is not seen elsewhere."""


class RevocableBuffer:
    """Memory that is filled from its start. Threads use `land` and `receive`, the caller `have` and `close`."""

    def __init__(self, target: memoryview) -> None:
        self._target = target
        self._lock = threading.Lock()
        self._is_closed = False
        self.have = 0  # valid bytes from the start
        self.moved_s = time.monotonic()  # when the last bytes arrived

    def land(self, data: memoryview | bytes) -> None:
        """Append `data`, which must fit. Raises: BufferRevokedError."""
        end = self.have + len(data)
        if end > len(self._target):
            raise ValueError(f"{end} bytes for memory of {len(self._target)}")
        with self._lock:
            self._check()
            copy_bytes(self._target[self.have : end], data)
            self.have = end
        self.moved_s = time.monotonic()

    def receive(self, read_into: Callable[[memoryview], int], max_bytes: int) -> int:
        """Let `read_into` write up to `max_bytes` and return the number of bytes. Raises: BufferRevokedError.

        `read_into` must end soon after the caller stops it (shuts its socket); until then `close` waits.
        """
        with self._lock:
            self._check()
            count = read_into(self._target[self.have : self.have + max_bytes])
            self.have += count
        self.moved_s = time.monotonic()
        return count

    def give_up(self) -> None:
        """Make the next write raise BufferRevokedError."""
        self._is_closed = True

    async def close(self) -> None:
        """Revoke the memory. When it returns, or is cancelled, nothing writes to it any more."""
        import asyncio  # already imported there; users without a loop start faster without it

        self._is_closed = True
        cancelled: asyncio.CancelledError | None = None
        while not self._lock.acquire(blocking=False):
            try:
                await asyncio.sleep(0.001)  # a copy takes as long, and so does a shut socket
            except asyncio.CancelledError as error:
                cancelled = error
        self._lock.release()
        if cancelled is not None:
            raise cancelled

    def moved(self) -> float:
        """Return when the last bytes arrived, for `run_apart`."""
        return self.moved_s

    def _check(self) -> None:
        if self._is_closed:
            raise BufferRevokedError


def copy_bytes(target: memoryview, data: memoryview | bytes) -> None:
    """Copy into memory of the same length, without stopping other threads for a large copy."""
    if len(target) <= _SMALL_BYTES or (isinstance(data, memoryview) and data.readonly):
        target[:] = data
        return
    source = data if isinstance(data, bytes) else address_of(data)
    ctypes.memmove(address_of(target), source, len(target))


def address_of(view: memoryview) -> int:
    """Return the address of a writable view of at least one byte."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
