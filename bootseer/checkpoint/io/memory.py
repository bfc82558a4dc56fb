"""Memory for reads: large anonymous areas on huge pages, allocated once and filled in place.

Page faults, not copies, dominate the cost of a load: 4 KiB pages take about 1 CPU s per GB, huge pages a quarter
of it. An area starts at a huge-page boundary. A read around the page cache (O_DIRECT) goes straight into it if
target and file offset have the same position within a page (`place`).
"""

from __future__ import annotations

import mmap

from bootseer.checkpoint.io.capacity import format_bytes
from bootseer.errors import CheckpointError
from bootseer.linux.cgroups import read_memory
from bootseer.storage.engine.revocable_buffer import address_of

HUGE_PAGE_BYTES = 2 << 20
SMALL_BYTES = 32 << 10  # below, the interpreter's own allocator is used
PAGE_BYTES = 4096  # also the largest block that O_DIRECT requires on common file systems


def allocate(size: int, purpose: str = "the checkpoint") -> memoryview:
    """Return zeroed, writable, private memory of `size` bytes. It lives for as long as any view of it.

    Raises: CheckpointError if the system refuses it (it refuses rarely: call `check_free` before).
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
        pass  # a kernel without huge pages: slower, but correct
    start = -address_of(memoryview(area)) % HUGE_PAGE_BYTES
    return memoryview(area)[start : start + size]


def check_free(size: int, purpose: str) -> None:
    """Check free memory. Raises: CheckpointError if the machine or a cgroup has less than `size` bytes."""
    if size < HUGE_PAGE_BYTES:
        return
    memory = read_memory()
    if size > memory.free_bytes:
        raise CheckpointError(
            f"{purpose} needs {format_bytes(size)} of memory and {memory.limited_by} has "
            f"{format_bytes(memory.free_bytes)} free: load fewer tensors or files"
        )


def place(after: int, offset: int) -> int:
    """Return the first place at or after `after` with the same position within a page as `offset` of a file."""
    return after + (offset - after) % PAGE_BYTES
