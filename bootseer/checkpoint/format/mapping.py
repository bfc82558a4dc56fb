"""Mappings of descriptors that do not keep them: Python's own mmap holds a duplicate while the mapping exists.

An arena has thousands of files, and a rank thousands of tensors, each a mapping; descriptors are few. In: a
descriptor and a range. Out: a view that unmaps once no reference to it or to a part of it exists.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref

from bootseer.linux.syscalls import last_error, libc

_mmap, _munmap, _madvise = libc().mmap, libc().munmap, libc().madvise
MAP_FAILED = ctypes.c_void_p(-1).value


def map_range(
    fd: int, offset: int, length: int, *, is_private: bool = False, is_writable: bool = True
) -> memoryview:
    """Map bytes of a file as memory. Raises OSError."""
    if not length:
        return memoryview(bytearray())
    within = offset % mmap.PAGESIZE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    size = within + length
    start = _mmap(None, size, protection, flags, fd, offset - within)
    if start == MAP_FAILED:
        raise last_error()
    area = (ctypes.c_ubyte * size).from_address(start)
    # Not at exit: other exit handlers may still read tensors.
    weakref.finalize(area, _munmap, start, size).atexit = False
    return memoryview(area).cast("B")[within:]


def advise(view: memoryview, advice: int) -> int:
    """Call madvise for the pages of a writable view, without the GIL. Return 0, or the error's number."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    within = start % mmap.PAGESIZE
    return ctypes.get_errno() if _madvise(start - within, len(view) + within, advice) else 0
