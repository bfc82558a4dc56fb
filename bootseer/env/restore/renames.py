"""Adapter for renameat2(2): exchanging two names, and moving a name to one that is free.

Names are single names in open directories. A result reports what a file system does not support, so that the
caller can use another method.

Source: rename(2); Documentation/filesystems/overlayfs.rst for EXDEV of directories.
"""

from __future__ import annotations

import errno
import os
import stat

from bootseer.linux.syscalls import call

_NOREPLACE, _EXCHANGE = 1, 2
_UNKNOWN = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def try_exchange(fd: int, name: bytes, other_fd: int, other: bytes) -> bool:
    """Exchange two names atomically; return False if that is not supported. Raises: OSError."""
    number = _rename(fd, name, other_fd, other, _EXCHANGE)
    if number in _UNKNOWN or number == errno.EXDEV:  # overlayfs: a directory of a lower layer
        return False
    _raise(number, other)
    return True


def move(fd: int, name: bytes, to_fd: int, to: bytes, *, goes_on: bool = False) -> None:
    """Move a file or directory to a name that is free.

    A directory that cannot be renamed (of a lower layer of overlayfs) is moved entry by entry.

    Args: goes_on: an existing directory of the new name is the rest of an interrupted call, and is continued.
    Raises: FileExistsError; OSError.
    """
    number = _move_new(fd, name, to_fd, to)
    if number in (errno.EACCES, errno.EPERM) and os.geteuid() and _is_directory(fd, name):
        number = _move_closed(fd, name, to_fd, to)
    is_begun = goes_on and number == errno.EEXIST and _is_directory(to_fd, to)
    if (number == errno.EXDEV or is_begun) and _is_directory(fd, name):
        _move_children(fd, name, to_fd, to)
        return
    _raise(number, to)


def _move_new(fd: int, name: bytes, to_fd: int, to: bytes) -> int:
    number = _rename(fd, name, to_fd, to, _NOREPLACE)
    if number in _UNKNOWN:  # NFS, some FUSE file systems
        if exists(to_fd, to):
            return errno.EEXIST
        try:
            os.rename(name, to, src_dir_fd=fd, dst_dir_fd=to_fd)
        except OSError as error:
            return error.errno or errno.EIO
        return 0
    return number


def _move_closed(fd: int, name: bytes, to_fd: int, to: bytes) -> int:
    """Move a directory that this user may not write to: its `..` entry changes."""
    mode = stat.S_IMODE(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    directory = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
    try:
        os.fchmod(directory, mode | 0o700)
        number = _move_new(fd, name, to_fd, to)
        os.fchmod(directory, mode)
    finally:
        os.close(directory)
    return number


def _move_children(fd: int, name: bytes, to_fd: int, to: bytes) -> None:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    source = os.open(name, flags, dir_fd=fd)
    try:
        status = os.fstat(source)
        try:
            os.mkdir(to, 0o700, dir_fd=to_fd)
        except FileExistsError:
            pass
        target = os.open(to, flags, dir_fd=to_fd)
        try:
            for child in map(os.fsencode, os.listdir(source)):
                move(source, child, target, child, goes_on=True)
            if os.geteuid() == 0:
                os.fchown(target, status.st_uid, status.st_gid)
            os.fchmod(target, stat.S_IMODE(status.st_mode))
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
        finally:
            os.close(target)
    finally:
        os.close(source)
    os.rmdir(name, dir_fd=fd)


def _is_directory(fd: int, name: bytes) -> bool:
    try:
        return stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def exists(fd: int, name: bytes) -> bool:
    """Return whether a name exists in an open directory."""
    try:
        os.stat(name, dir_fd=fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _rename(fd: int, name: bytes, to_fd: int, to: bytes, flags: int) -> int:
    """Return 0 or the error number."""
    return call("renameat2", fd, name, to_fd, to, flags)


def _raise(number: int, name: bytes) -> None:
    if number:
        raise OSError(number, os.strerror(number), os.fsdecode(name))
