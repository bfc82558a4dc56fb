"""A device whose readers wait for a failure once: the kernel reads what failed to be read ahead again at once.

In: the device of the cache, whose reads fail at their deadline at the latest. Out: the same, but for reads that
come right after one that failed so late: they fail without another wait, or who reads would wait twice as long.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from bootseer.mounts.flat_file import Device, Done
from bootseer.tree.index import BLOCK_BYTES

AGAIN_S = 0.5  # the kernel's second read comes within it
LATE_SHARE = 0.5  # of the deadline; what fails sooner may as well be tried again
MOST_BLOCKS = 4096  # remembered


class ImpatientDevice:
    """Thread-safe."""

    def __init__(
        self, device: Device, deadline_s: float, failed_again: Callable[[range], object] = lambda _: None
    ) -> None:
        """Args: failed_again: told of blocks whose reader is about to get an error without having waited."""
        self.size = device.size
        self.try_read = device.try_read  # as it is: it is called for each read
        self._device, self._failed_again = device, failed_again
        self._late_s = deadline_s * LATE_SHARE
        self._failed_s: dict[int, float] = {}  # when the last read of a block failed

    def read_later(self, offset: int, length: int, done: Done) -> None:
        """As `Device`."""
        now_s = time.monotonic()
        failed_s = self._failed_s
        if failed_s and any(now_s - failed_s.get(each, -AGAIN_S) < AGAIN_S for each in _blocks(offset, length)):
            self._failed_again(_blocks(offset, length))
            done(None)
            return
        self._device.read_later(offset, length, partial(self._finish, offset, length, now_s, done))

    def _finish(
        self, offset: int, length: int, begin_s: float, done: Done, data: memoryview | bytes | None
    ) -> None:
        if data is None and (now_s := time.monotonic()) - begin_s >= self._late_s:
            if len(self._failed_s) > MOST_BLOCKS:
                self._failed_s.clear()
            self._failed_s.update(dict.fromkeys(_blocks(offset, length), now_s))
        done(data)


def _blocks(offset: int, length: int) -> range:
    return range(offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES + 1)
