"""Mounts EROFS metadata whose data lies on a device: a plain file, or the one file of a FlatFile.

By mount(2) on plain files: mount(8) would make a loop device. The kernel's abilities are found out by trying.
"""

from __future__ import annotations

import errno
import os

from bootseer.errors import ConfigError, StorageError
from bootseer.linux import mount as kernel


def mount_erofs(metadata_path: str, device_path: str, directory: str) -> None:
    """Mount a tree read-only at `directory`.

    Reads bypass the page cache of the device (`directio`), or data would be cached twice. Also, through the page
    cache a read that fails in the middle ends as a short one, and EROFS fills short ones up with zeros. Kernels
    without the option always bypass it.

    Raises: ConfigError when this process, kernel or file system does not support it; StorageError.
    """
    metadata_path, device_path, directory = (
        os.path.abspath(path) for path in (metadata_path, device_path, directory)
    )
    flags = kernel.RDONLY | kernel.NODEV | kernel.NOSUID
    fd = -1
    try:
        if "," in device_path:  # options cannot contain it
            fd = _open(device_path, directory)
        device = f"device=/proc/self/fd/{fd}" if fd >= 0 else f"device={device_path}"
        number = kernel.try_mount(metadata_path, directory, "erofs", flags, f"{device},directio")
        if number == errno.EINVAL:
            number = kernel.try_mount(metadata_path, directory, "erofs", flags, device)
    finally:
        if fd >= 0:
            os.close(fd)
    if number:
        raise _error(number, metadata_path, device_path, directory)


def _open(path: str, directory: str) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as caught:
        raise kernel.mount_error(caught.errno or errno.EIO, path, directory, "erofs") from caught


def _error(number: int, metadata_path: str, device_path: str, directory: str) -> ConfigError | StorageError:
    if number == errno.ENOTBLK:
        return ConfigError(
            f"{directory}: this kernel cannot mount EROFS from {metadata_path}: this needs Linux 6.12 or newer "
            "with EROFS_FS_BACKED_BY_FILE, and a file on a disk's file system (not tmpfs)"
        )
    if number == errno.ENOTCONN:
        return ConfigError(f"{directory}: cannot be mounted: the server of {device_path} has ended")
    for path in (metadata_path, device_path):
        if number == errno.ENOENT and not os.path.exists(path):
            return ConfigError(f"{directory}: cannot be mounted: {path} does not exist")
    return kernel.mount_error(number, metadata_path, directory, "erofs")
