"""The C library by ctypes, for system calls that Python has no function for.

Not for files that run by path in other interpreters (launcher/in_rank/bootstrap.py,
bootseer/mounts/sandbox/enter.py and their like).
"""

from __future__ import annotations

import ctypes
import os

from bootseer.light_typing import Any

_ADDRESS, _SIZE, _OFFSET = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
_DESCRIPTOR, _PATH, _FLAGS = ctypes.c_int, ctypes.c_char_p, ctypes.c_uint
_TYPES = {
    "fallocate": [_DESCRIPTOR, ctypes.c_int, _OFFSET, _OFFSET],
    "madvise": [_ADDRESS, _SIZE, ctypes.c_int],
    "mmap": [_ADDRESS, _SIZE, ctypes.c_int, ctypes.c_int, _DESCRIPTOR, ctypes.c_long],
    "munmap": [_ADDRESS, _SIZE],
    "renameat2": [_DESCRIPTOR, _PATH, _DESCRIPTOR, _PATH, _FLAGS],
    "statx": [_DESCRIPTOR, _PATH, ctypes.c_int, _FLAGS, _PATH],
}


_libc: Any = None


def libc() -> Any:
    """Return the C library. Its functions keep errno for `last_errno`."""
    global _libc
    if _libc is not None:
        return _libc
    found = ctypes.CDLL(None, use_errno=True)
    found.syscall.restype, found.mmap.restype = ctypes.c_long, _ADDRESS
    for name, types in _TYPES.items():
        if hasattr(found, name):  # not every C library has all
            getattr(found, name).argtypes = types
    _libc = found
    return found


def last_errno() -> int:
    """Return the error number of this thread's last failed call."""
    return ctypes.get_errno()


def last_error() -> OSError:
    """Return the error of this thread's last failed call."""
    return OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def call(name: str, *arguments: Any) -> int:
    """Call a function of the C library; return 0, or the error number."""
    return 0 if getattr(libc(), name)(*arguments) == 0 else ctypes.get_errno()


def syscall(number: int, *arguments: int | bytes) -> int:
    """Make a system call that not every C library names; return -1 with an errno on error."""
    words = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return int(libc().syscall(ctypes.c_long(number), *words))
