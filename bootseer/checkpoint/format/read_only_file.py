"""Read-only files of a known size over other bytes. Subclasses supply the bytes of a range."""

from __future__ import annotations

import io
from abc import abstractmethod
from typing import Any


class ReadOnlyFile(io.RawIOBase):
    """A seekable file of `size` bytes."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._at = 0

    @abstractmethod
    def fill(self, offset: int, target: memoryview) -> None:
        """Fill `target`, at least one byte, from `offset`; all of it lies within the file."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = (0, self._at, self._size)[whence] + offset
        if at < 0:
            raise OSError("before the start")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = max(0, min(len(target), self._size - self._at))
        if count:
            self.fill(self._at, target[:count])
            self._at += count
        return count


class MemoryFile(ReadOnlyFile):
    """A readable file over memory that is not copied."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(len(view))
        self._view = view

    def fill(self, offset: int, target: memoryview) -> None:
        target[:] = self._view[offset : offset + len(target)]
