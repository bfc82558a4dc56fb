"""Mounts EROFS metadata whose data lies on a device: a plain file, or the one file of a FlatFile.

By mount(2) on files as they are: mount(8) would make a loop device. What the kernel can is found out by trying.
"""

from __future__ import annotations

import errno
import os

from bootseer.errors import ConfigError, StorageError
from bootseer.mounts import kernel


def mount_erofs(metadata_path: str, device_path: str, folder: str) -> None:
    """Shows a tree read-only at `folder`.

    Reads go past the page cache of the device (`directio`), or data would be kept twice. More than that: through
    the page cache a read that fails half way ends as a short one, and EROFS fills short ones up with zeros.
    Kernels that do not know the option read in no other way.

    Raises: ConfigError when this process, kernel or file system cannot have it; StorageError.
    """
    metadata_path, device_path, folder = (os.path.abspath(path) for path in (metadata_path, device_path, folder))
    flags = kernel.RDONLY | kernel.NODEV | kernel.NOSUID
    fd = -1
    try:
        if "," in device_path:  # options have no way to spell it
            fd = _open(device_path, folder)
        device = f"device=/proc/self/fd/{fd}" if fd >= 0 else f"device={device_path}"
        number = kernel.try_mount(metadata_path, folder, "erofs", flags, f"{device},directio")
        if number == errno.EINVAL:
            number = kernel.try_mount(metadata_path, folder, "erofs", flags, device)
    finally:
        if fd >= 0:
            os.close(fd)
    if number:
        raise _error(number, metadata_path, device_path, folder)


def _open(path: str, folder: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as caught:
        raise kernel.mount_error(caught.errno or errno.EIO, path, folder, "erofs") from caught


def _error(number: int, metadata_path: str, device_path: str, folder: str) -> ConfigError | StorageError:
    if number == errno.ENOTBLK:
        return ConfigError(
            f"{folder}: this kernel cannot mount EROFS from {metadata_path}: it takes Linux 6.12 or newer with "
            "EROFS_FS_BACKED_BY_FILE, and a file on a disk's file system (not tmpfs)"
        )
    if number == errno.ENOTCONN:
        return ConfigError(f"{folder}: cannot be mounted: the server of {device_path} is gone")
    for path in (metadata_path, device_path):
        if number == errno.ENOENT and not os.path.exists(path):
            return ConfigError(f"{folder}: cannot be mounted, as {path} does not exist")
    return kernel.mount_error(number, metadata_path, folder, "erofs")
