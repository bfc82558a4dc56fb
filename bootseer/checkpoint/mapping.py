"""Maps descriptors without keeping them: Python's own mmap holds a duplicate for as long as the mapping lives.

An arena has thousands of files, and a rank thousands of tensors, each a mapping; descriptors are few. In: a
descriptor and a range. Out: a view that unmaps when nobody has it, or any part of it, any more.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
MAP_FAILED = ctypes.c_void_p(-1).value


def map_range(
    fd: int, offset: int, length: int, *, is_private: bool = False, is_writable: bool = True
) -> memoryview:
    """Bytes of a file as memory. Raises OSError."""
    if not length:
        return memoryview(bytearray())
    within = offset % mmap.PAGESIZE
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if is_writable else 0)
    flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
    size = within + length
    start = _mmap(None, size, protection, flags, fd, offset - within)
    if start == MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    area = (ctypes.c_ubyte * size).from_address(start)
    # Not at exit: other exit handlers may still look at tensors.
    weakref.finalize(area, _munmap, start, size).atexit = False
    return memoryview(area).cast("B")[within:]


def advise(view: memoryview, advice: int) -> int:
    """madvise for the pages of a writable view, without the interpreter's lock. 0, or the error's number."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(view))
    within = start % mmap.PAGESIZE
    return ctypes.get_errno() if _madvise(start - within, len(view) + within, advice) else 0
