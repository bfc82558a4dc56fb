"""EROFS metadata in memory, as the source of a file of a mount: complete, or still being made.

Implements flat_server.Device. A read of missing bytes is answered once they are made; no other bytes are returned.
"""

from __future__ import annotations

import threading
from mmap import mmap

from bootseer.mounts.device.server import Done


class MetadataMemory:
    """Bytes that are complete, or only their first part: reads of the rest wait for `complete` or `fail`.

    Thread-safe.
    """

    def __init__(self, data: mmap | bytes | bytearray | memoryview, ready_bytes: int | None = None) -> None:
        """Args: data: as long as it will be, or longer; ready_bytes: length of its complete part; None: all."""
        self.size = len(data)
        self._data = memoryview(data)
        self._ready_bytes = self.size if ready_bytes is None else ready_bytes
        self._used_bytes = self.size
        self._is_failed = False
        self._waiting: list[tuple[int, int, Done]] = []
        self._lock = threading.Lock()

    @property
    def data(self) -> memoryview:
        """Return all bytes; only when they are complete."""
        assert self._ready_bytes == self.size
        return self._data[: self._used_bytes]

    def try_read(self, offset: int, target: memoryview) -> bool:
        end = offset + len(target)
        if end > self._ready_bytes:
            return False
        target[:] = self._data[offset:end]
        return True

    def read_later(self, offset: int, length: int, done: Done) -> None:
        with self._lock:
            is_ready = offset + length <= self._ready_bytes
            if not is_ready and not self._is_failed:
                self._waiting.append((offset, length, done))
                return
        done(self._data[offset : offset + length] if is_ready else None)

    def complete(self, used_bytes: int, other: bytes | bytearray | None = None) -> None:
        """Mark all bytes as complete.

        Args: used_bytes: their number; zeros follow. other: the same bytes made elsewhere, where these were not
            finished.
        """
        assert used_bytes <= self.size
        with self._lock:
            self._used_bytes = used_bytes
            if other is not None:
                self._data = memoryview(bytes(other).ljust(self.size, b"\0"))
            self._ready_bytes = self.size
            waiting, self._waiting = self._waiting, []
        for offset, length, done in waiting:
            done(self._data[offset : offset + length])

    def fail(self) -> None:
        """Fail all waiting reads: no more bytes follow. After `complete` it does nothing."""
        with self._lock:
            self._is_failed = True
            waiting, self._waiting = self._waiting, []
        for _, _, done in waiting:
            done(None)
