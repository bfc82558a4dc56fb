"""Mapping of errors of the operating system to Bootseer's, with the path and a hint."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from bootseer.errors import AlreadyExists, NotFound, PermissionDenied, StorageError, Unavailable

_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_REFUSED = {errno.EACCES, errno.EPERM}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# A disk, a server or the kernel's memory: a retry may succeed.
_PASSING = {
    *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EREMOTEIO),
    *(errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN, errno.ECONNRESET),
    *(errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE),
}


@contextmanager
def map_os_errors(where: str) -> Iterator[None]:
    """Map every OSError of the block to a StorageError. `where`: the path or the URL."""
    try:
        yield
    except OSError as error:
        raise to_storage_error(error, where) from error


def to_storage_error(error: OSError, where: str) -> StorageError:
    """Return the StorageError for an error of the operating system."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.errno in _MISSING or isinstance(error, FileNotFoundError):
        return NotFound(f"{where}: not found ({reason})")
    if isinstance(error, FileExistsError):
        return AlreadyExists(f"{where}: already exists")
    if error.errno == errno.EROFS:
        return PermissionDenied(f"{where}: {reason}: mount it for writing, or write elsewhere")
    if error.errno in _REFUSED or isinstance(error, PermissionError):
        return PermissionDenied(f"{where}: {reason}: this user lacks the permission")
    if error.errno in _FULL:
        return StorageError(f"{where}: {reason}: make room there, or write elsewhere")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageError(f"{where}: {reason}: raise the limit of open files (ulimit -n)")
    if error.errno in _PASSING or isinstance(error, ConnectionError | TimeoutError):
        return Unavailable(f"{where}: {reason}")
    return StorageError(f"{where}: {reason}")
