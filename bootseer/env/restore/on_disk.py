"""The identity of a file on disk, which is valid after a reboot too, and syncing of its file system.

An inode number alone is weak: a new directory often gets the number of a removed one. Devices are renumbered at
every mount. The time of birth identifies a file if the file system keeps it.

Source: statx(2); Documentation/filesystems/overlayfs.rst, "Inode properties".
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat

import msgspec

from bootseer.linux.syscalls import libc

_EMPTY_PATH, _NOFOLLOW, _BIRTH = 0x1000, 0x100, 0x800  # AT_EMPTY_PATH, AT_SYMLINK_NOFOLLOW, STATX_BTIME
_STATX_BYTES, _BIRTH_OFFSET = 256, 80


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """The identity of a file or directory."""

    inode: int
    born_ns: int  # 0 if the file system does not keep it
    is_folder: bool

    def is_of(self, other: Identity | None) -> bool:
        """Return whether both are the same file."""
        if other is None or other.is_folder != self.is_folder:
            return False
        if self.born_ns and other.born_ns:
            # The inode number of a directory of overlayfs may change with the next mount.
            return self.born_ns == other.born_ns and (self.is_folder or self.inode == other.inode)
        return self.inode == other.inode


NOTHING = Identity(0, 0, False)


def identity(fd: int, name: bytes = b"") -> Identity | None:
    """Return the identity of a name in an open directory, or of the open file; None: missing. Raises: OSError."""
    try:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False) if name else os.fstat(fd)
    except FileNotFoundError:
        return None
    return Identity(found.st_ino, _born_ns(fd, name), stat.S_ISDIR(found.st_mode))


def sync_file_system(fd: int) -> bool:
    """Write all pending data of the file system of an open file; may take minutes. Return whether it succeeded."""
    return int(libc().syncfs(fd)) == 0


def sync_names(fd: int) -> None:
    """Write the names in an open directory, if the file system supports that. Raises: OSError."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
            raise


def _born_ns(fd: int, name: bytes) -> int:
    statx = getattr(libc(), "statx", None)
    if statx is None:
        return 0
    data = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, name, _NOFOLLOW | (0 if name else _EMPTY_PATH), _BIRTH, data) != 0:
        return 0
    if not ctypes.c_uint32.from_buffer(data).value & _BIRTH:
        return 0
    seconds = ctypes.c_int64.from_buffer(data, _BIRTH_OFFSET).value
    return seconds * 10**9 + ctypes.c_uint32.from_buffer(data, _BIRTH_OFFSET + 8).value
