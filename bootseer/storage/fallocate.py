"""Room of an open file: reserved, or given back with what is in it. Source: fallocate(2)."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

_KEEP_SIZE, _PUNCH_HOLE = 1, 2


def reserve(fd: int, length: int) -> bool:
    """From the start, which becomes the size. False where it cannot be; glibc's own way would write zeros then."""
    return bool(_libc().fallocate(fd, 0, 0, length) == 0)


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Whole pages go, and are zeros from now on; who was given these very pages, a socket say, keeps them as they
    are. False where it cannot be."""
    return bool(_libc().fallocate(fd, _KEEP_SIZE | _PUNCH_HOLE, offset, length) == 0)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc
