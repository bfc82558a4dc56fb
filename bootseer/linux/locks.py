"""Locks of open files: of whole files (flock(2)), and of bytes. The kernel frees them when their process ends.

Locks of bytes are open file description locks (fcntl(2)): two opens of one file exclude each other also within a
process, and closing one of them does not free the other's locks. All cost a system call and nothing on disk.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid
_RETRY_S = 0.005
# Errors of file systems without locks (Lustre without -o flock, some of FUSE), or of kernels without these.
NO_LOCK_ERRNOS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})


def try_flock(fd: int, *, is_shared: bool = False) -> bool:
    """Lock a whole file or directory; return False while others hold it. Raises: OSError, as `try_lock`."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(fd: int, path: str) -> bool:
    """Return whether a path is that of the open file: others may have replaced it before it was locked."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def try_lock(fd: int, start: int, *, is_shared: bool = False) -> bool:
    """Lock the byte `start` of an open file, if it is free. The byte need not exist.

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
    """Lock a byte and wait for it; return False when it is not free in time."""
    end_s = time.monotonic() + timeout_s
    while not try_lock(fd, start, is_shared=is_shared):
        if time.monotonic() >= end_s:
            return False
        time.sleep(_RETRY_S)
    return True


def unlock(fd: int, start: int) -> None:
    """Free the byte; an unlocked one is no error."""
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, start, 1, 0))


def try_lock_if_any(fd: int, start: int) -> bool:
    """As `try_lock`, but True where the file system has no locks: work may be done twice."""
    try:
        return try_lock(fd, start)
    except OSError:
        return True


def unlock_if_any(fd: int, start: int) -> None:
    """As `unlock`, but ignore missing locks and a closed file."""
    try:
        unlock(fd, start)
    except OSError:
        pass
