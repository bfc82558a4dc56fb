"""What the disk knows of a file: which one it is, also after another boot, and whether all of it is there.

An inode number alone says little: the next folder that is made often gets that of the one that was removed.
Devices are numbered anew at every mount. The time of birth tells files apart where the file system keeps it.

Source: statx(2); Documentation/filesystems/overlayfs.rst, "Inode properties".
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
from typing import Any

import msgspec

_EMPTY_PATH, _NOFOLLOW, _BIRTH = 0x1000, 0x100, 0x800  # AT_EMPTY_PATH, AT_SYMLINK_NOFOLLOW, STATX_BTIME
_STATX_BYTES, _BIRTH_OFFSET = 256, 80


class Identity(msgspec.Struct, frozen=True, array_like=True):
    """Which file or folder it is."""

    inode: int
    born_ns: int  # 0 where the file system does not keep it
    is_folder: bool

    def is_of(self, other: Identity | None) -> bool:
        """Whether the other one is the same."""
        if other is None or other.is_folder != self.is_folder:
            return False
        if self.born_ns and other.born_ns:
            # Of a folder of overlayfs the number may be another one after the next mount.
            return self.born_ns == other.born_ns and (self.is_folder or self.inode == other.inode)
        return self.inode == other.inode


NOTHING = Identity(0, 0, False)


def identity(fd: int, name: bytes = b"") -> Identity | None:
    """Of a name in an open folder, else of the open file itself; None if there is nothing. Raises: OSError."""
    try:
        found = os.stat(name, dir_fd=fd, follow_symlinks=False) if name else os.fstat(fd)
    except FileNotFoundError:
        return None
    return Identity(found.st_ino, _born_ns(fd, name), stat.S_ISDIR(found.st_mode))


def sync_file_system(fd: int) -> bool:
    """Has everything written that the file system of an open file has got so far; may take minutes."""
    return int(_libc().syncfs(fd)) == 0


def sync_names(fd: int) -> None:
    """Has the names in an open folder written, where the file system does that for folders. Raises: OSError."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP, errno.EBADF):
            raise


def _born_ns(fd: int, name: bytes) -> int:
    statx = getattr(_libc(), "statx", None)
    if statx is None:
        return 0
    data = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(fd, name, _NOFOLLOW | (0 if name else _EMPTY_PATH), _BIRTH, data) != 0:
        return 0
    if not ctypes.c_uint32.from_buffer(data).value & _BIRTH:
        return 0
    seconds = ctypes.c_int64.from_buffer(data, _BIRTH_OFFSET).value
    return seconds * 10**9 + ctypes.c_uint32.from_buffer(data, _BIRTH_OFFSET + 8).value


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "statx"):
        libc.statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_char_p]
    return libc
