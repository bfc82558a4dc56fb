"""Memory for what is read: large anonymous areas on huge pages, made once and filled in place.

Page faults, not copies, are what a load costs: 4 KiB pages take about 1 CPU s a GB, huge pages a quarter of it.
An area starts at a huge-page boundary, so a read around the page cache (O_DIRECT) goes straight into it when its
place has the same offset within a page as the bytes have in their file (`place`).
"""

from __future__ import annotations

import ctypes
import io
import mmap
from typing import Any

from bootseer.checkpoint.capacity import format_bytes
from bootseer.errors import CheckpointError
from bootseer.storage.memory_limits import read_memory

HUGE_PAGE_BYTES = 2 << 20
SMALL_BYTES = 32 << 10  # below, the interpreter's own allocator does
PAGE_BYTES = 4096  # also the coarsest block that O_DIRECT asks for on common file systems


def allocate(size: int, purpose: str = "the checkpoint") -> memoryview:
    """Zeroed, writable, private memory of `size` bytes. It lives for as long as any view of it.

    Raises: CheckpointError when the system refuses it (it refuses rarely: ask `check_free` before).
    """
    if size < SMALL_BYTES:
        return memoryview(bytearray(size))
    huge = size >= HUGE_PAGE_BYTES
    length = -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES if huge else size
    try:
        area = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise CheckpointError(f"no memory for {purpose}, {format_bytes(size)}: {error.strerror}") from error
    if not huge:
        return memoryview(area)
    try:
        area.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without them: slower, and right
    start = -address(memoryview(area)) % HUGE_PAGE_BYTES
    return memoryview(area)[start : start + size]


def check_free(size: int, purpose: str) -> None:
    """Raises: CheckpointError when the machine or a cgroup has less than `size` bytes left."""
    if size < HUGE_PAGE_BYTES:
        return
    memory = read_memory()
    if size > memory.free_bytes:
        raise CheckpointError(
            f"{purpose} needs {format_bytes(size)} of memory and {memory.limited_by} has "
            f"{format_bytes(memory.free_bytes)} free: load fewer tensors or files"
        )


def address(view: memoryview) -> int:
    """Where a writable view begins."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def place(after: int, offset: int) -> int:
    """The first place at or behind `after` that has the same position within a page as `offset` of a file."""
    return after + (offset - after) % PAGE_BYTES


class MemoryFile(io.RawIOBase):
    """A file to read, over memory that is not copied."""

    def __init__(self, view: memoryview) -> None:
        super().__init__()
        self._view = view
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        if base + offset < 0:
            raise OSError("before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, target: Any) -> int:
        part = self._view[self._at : self._at + len(target)]
        target[: len(part)] = part
        self._at += len(part)
        return len(part)
