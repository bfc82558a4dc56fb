"""Locks on bytes of a file, held by an open file: the kernel frees them when their holder ends, however it ends.

Open file description locks (fcntl(2)): two opens of one file exclude each other also within a process, and closing
one of them does not free the other's locks. They cost a system call each and nothing on disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid
_RETRY_S = 0.005
# What file systems say that have no locks (Lustre without -o flock, some of FUSE), or kernels without these.
NO_LOCK_ERRNOS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def try_lock(fd: int, start: int, *, is_shared: bool = False) -> bool:
    """Locks the byte `start` of an open file, if nobody else has it. The byte need not exist.

    Raises: OSError from file systems without locks (NO_LOCK_ERRNOS).
    """
    kind = fcntl.F_RDLCK if is_shared else fcntl.F_WRLCK
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, start, 1, 0))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def wait_lock(fd: int, start: int, *, timeout_s: float, is_shared: bool = False) -> bool:
    """The same, waiting for it; False when it is not free in time."""
    end_s = time.monotonic() + timeout_s
    while not try_lock(fd, start, is_shared=is_shared):
        if time.monotonic() >= end_s:
            return False
        time.sleep(_RETRY_S)
    return True


def unlock(fd: int, start: int) -> None:
    """Frees the byte; one that is not locked is no error."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, 1, 0))


def try_lock_if_any(fd: int, start: int) -> bool:
    """As `try_lock`; where the file system has no locks, everybody has them: work may be done twice."""
    try:
        return try_lock(fd, start)
    except OSError:
        return True


def unlock_if_any(fd: int, start: int) -> None:
    """As `unlock`, also where there are no locks, and of a file that was closed."""
    try:
        unlock(fd, start)
    except OSError:
        pass
