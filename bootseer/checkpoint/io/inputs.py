"""Sources of bytes for a writer: memory, local files, streams; other versions are in version_input.py.

All except a stream can be read at any offset, in several ranges at once, and again after a failure.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from bootseer import aio
from bootseer.errors import NotFound, PermissionDenied, SourceChanged, StorageError, Truncated
from bootseer.storage.engine.revocable_buffer import copy_bytes


class Input(Protocol):
    """A known number of bytes."""

    size: int  # bytes

    async def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` from `offset` on."""


class Stream(NamedTuple):
    """An unknown number of bytes, read once, in order."""

    chunks: AsyncIterator[bytes | memoryview]


class MemoryInput:
    """Consecutive buffers, such as those of tensors; they must not change until they are written."""

    def __init__(self, buffers: Sequence[memoryview | bytes | bytearray]) -> None:
        self._views = [view for each in buffers if len(view := memoryview(each).cast("B"))]
        self._starts = list(accumulate((len(view) for view in self._views), initial=0))
        self.size = self._starts.pop()

    async def read_into(self, offset: int, target: memoryview) -> None:
        if offset + len(target) > self.size:
            raise Truncated(f"bytes {offset} to {offset + len(target)} of {self.size} in memory")
        await aio.run_io(self._copy, offset, target)

    def _copy(self, offset: int, target: memoryview) -> None:
        index = bisect_right(self._starts, offset) - 1
        done = 0
        while done < len(target):
            view = self._views[index]
            start = offset + done - self._starts[index]
            count = min(len(view) - start, len(target) - done)
            copy_bytes(target[done : done + count], view[start : start + count])
            done += count
            index += 1


class FileInput:
    """A local file; it must not change while it is read."""

    def __init__(self, path: str) -> None:
        self._path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFound(f"{path}: no such file") from error
        except PermissionError as error:
            raise PermissionDenied(f"{path}: permission denied") from error
        except OSError as error:
            raise StorageError(f"{path}: {os.strerror(error.errno or 0).lower()}") from error
        found = os.fstat(self._fd)
        self.size = found.st_size
        self._mark = (found.st_mtime_ns, found.st_size)

    async def read_into(self, offset: int, target: memoryview) -> None:
        await aio.run_io(self._read, offset, target)

    def _read(self, offset: int, target: memoryview) -> None:
        done = 0
        while done < len(target):
            try:
                got = os.preadv(self._fd, [target[done:]], offset + done)
            except OSError as error:
                raise StorageError(f"{self._path}: {os.strerror(error.errno or 0).lower()}") from error
            if not got:
                raise Truncated(f"{self._path}: was truncated while it was read")
            done += got

    def close(self) -> None:
        """Raises SourceChanged if the file has changed since it was opened."""
        found = os.fstat(self._fd)
        os.close(self._fd)
        if (found.st_mtime_ns, found.st_size) != self._mark:
            raise SourceChanged(f"{self._path}: was written to while it was read")


class PartInput:
    def __init__(self, whole: Input, offset: int, size: int) -> None:
        self._whole, self._offset, self.size = whole, offset, size

    async def read_into(self, offset: int, target: memoryview) -> None:
        await self._whole.read_into(self._offset + offset, target)
