"""Stacks directories by overlayfs: a tree, environments above it, and writes on top.

Setuid programs and devices have no effect in it. Links and metadata that lower layers could hold for other layers
(redirects, metacopy) are not followed: a tree has its own files only.

Source: Documentation/filesystems/overlayfs.rst
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence

from bootseer.errors import StorageError
from bootseer.linux import mount as kernel

_PLAIN = re.compile(r"[^\\:,\0]+")  # paths that need no escapes in options
_INITIAL_USERS = ["0", "0", "4294967295"]


def mount_overlay(lowers: Sequence[str], directory: str, *, upper: str = "", work: str = "") -> None:
    """Mount `lowers`, the first above the others, at `directory`.

    Args:
      upper: takes writes; without it the mount is read-only.
      work: an empty directory of the same file system as `upper`, for the kernel.

    Raises: ConfigError when this process, kernel or directory does not support it; StorageError.
    """
    assert lowers, "at least one"
    assert bool(upper) == bool(work), "both or none"
    directory = os.path.abspath(directory)
    lowers = [os.path.abspath(lower) for lower in lowers]
    flags = kernel.NOSUID | kernel.NODEV
    if not upper and len(lowers) == 1:
        _bind(lowers[0], directory, flags | kernel.RDONLY)
        return
    if not upper:
        flags |= kernel.RDONLY
    paths = [*lowers, *(os.path.abspath(path) for path in (upper, work) if path)]
    data = _options(paths, len(lowers))
    if len(os.fsencode(data)) <= kernel.MAX_DATA_BYTES and all(_PLAIN.fullmatch(path) for path in paths):
        kernel.mount("bootseer", directory, "overlay", flags, data)
    else:
        _mount_by_descriptors(paths, len(lowers), directory, flags)
    if upper and os.statvfs(directory).f_flag & os.ST_RDONLY:  # the kernel mounted it read-only, and logs why
        kernel.unmount_lazily(directory)
        raise StorageError(
            f"{directory}: overlayfs cannot write to {upper} and {work}: they must be this user's, on one file "
            "system that is not an overlay, not a network file system and not read-only"
        )


def _mount_by_descriptors(paths: list[str], lowers: int, directory: str, flags: int) -> None:
    """Mount by descriptors: for paths that options cannot contain, or that are too long together."""
    fds: list[int] = []
    try:
        for path in paths:
            try:
                fds.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            except OSError as caught:
                raise kernel.mount_error(caught.errno or errno.EIO, path, directory, "overlay") from caught
        kernel.mount(
            "bootseer", directory, "overlay", flags, _options([f"/proc/self/fd/{fd}" for fd in fds], lowers)
        )
    finally:
        for fd in fds:
            os.close(fd)


def _options(paths: list[str], lowers: int) -> str:
    options = ["lowerdir=" + ":".join(paths[:lowers])]
    options += [f"{name}={path}" for name, path in zip(("upperdir", "workdir"), paths[lowers:], strict=False)]
    options += ["redirect_dir=nofollow", "metacopy=off"]
    if not _is_initial_user_namespace():
        options.append("userxattr")  # its default marks are only for root
    return ",".join(options)


def _bind(source: str, directory: str, flags: int) -> None:
    """Bind one directory to another place. Flags are set afterwards; if that fails it is unmounted."""
    kernel.mount(source, directory, "", kernel.BIND)
    number = kernel.try_mount("", directory, "", kernel.REMOUNT | kernel.BIND | flags)
    if number:
        kernel.unmount_lazily(directory)
        raise kernel.mount_error(number, source, directory, "")


def _is_initial_user_namespace() -> bool:
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() == _INITIAL_USERS
    except OSError:
        return os.geteuid() == 0
