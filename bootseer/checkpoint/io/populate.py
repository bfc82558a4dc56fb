"""Memory filled ahead of its use: the page cache with a mapped file, or new pages to read into.

Page faults read a cold file in order, one read-ahead window at a time, with one kernel entry for every few pages.
This module keeps several large reads in flight and maps whole chunks instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from collections import deque

from bootseer.errors import StorageError
from bootseer.linux.syscalls import libc
from bootseer.storage.engine.revocable_buffer import address_of

PAGE_BYTES = 4096
NO_HUGE_PAGE = 15  # MADV_NOHUGEPAGE
POPULATE_READ = 22  # MADV_POPULATE_READ; Linux 5.14
POPULATE_WRITE = 23  # MADV_POPULATE_WRITE; Linux 5.14
THREADS = 4  # with chunks of 8 MiB a disk's queue is full
CHUNK_BYTES = 8 << 20

_madvise = libc().madvise


def make_pages(view: memoryview, *, is_huge: bool = True) -> bool:
    """Allocate the missing pages of writable memory; its content stays. Return False if the call is unsupported.

    Unless `is_huge` they are small pages, also where the memory was meant for huge ones.
    """
    start = address_of(view)
    first = -(-start // PAGE_BYTES) * PAGE_BYTES  # the page before may belong to other memory
    count = (start + len(view)) // PAGE_BYTES * PAGE_BYTES - first
    if count <= 0:
        return True
    if not is_huge:
        _madvise(first, count, NO_HUGE_PAGE)  # a kernel without huge pages has only small ones
    return not _madvise(first, count, POPULATE_WRITE)


def populate(fd: int, start: int, offset: int, length: int) -> bool:
    """Read a range of a file that is mapped at address `start`, and map its pages. Return False if unsupported.

    Raises: StorageError if the disk fails, which would be a SIGBUS later.
    """
    first, end = offset // PAGE_BYTES * PAGE_BYTES, offset + length
    chunks = deque(range(first, end, CHUNK_BYTES))
    failed: list[int] = []

    def work() -> None:
        while not failed:
            try:
                at = chunks.popleft()
            except IndexError:
                return
            count = min(CHUNK_BYTES, end - at)
            try:  # the whole chunk at once, independent of the disk's read-ahead window
                os.posix_fadvise(fd, at, count, os.POSIX_FADV_WILLNEED)
            except OSError:
                pass  # advice
            if _madvise(start + at, count, POPULATE_READ):
                failed.append(ctypes.get_errno())

    threads = [threading.Thread(target=work) for _ in range(min(THREADS, len(chunks)) - 1)]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if not failed:
        return True
    if failed[0] in (errno.EINVAL, errno.ENOSYS):
        return False
    raise StorageError(f"the disk or file system failed while the file was read: {os.strerror(failed[0])}")
