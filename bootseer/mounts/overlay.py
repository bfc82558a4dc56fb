"""Lays folders over each other by overlayfs: a tree, environments above it, and what is written on top.

Setuid programs and devices have no effect in it. Links and metadata that lower layers could hold for other
layers (redirects, metacopy) are not followed: a tree has its own files only.

Source: Documentation/filesystems/overlayfs.rst
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence

from bootseer.errors import StorageError
from bootseer.mounts import kernel

_PLAIN = re.compile(r"[^\\:,\0]+")  # paths that mean themselves in options
_INITIAL_USERS = ["0", "0", "4294967295"]


def mount_overlay(lowers: Sequence[str], folder: str, *, upper: str = "", work: str = "") -> None:
    """Shows `lowers`, the first above the others, at `folder`.

    Args:
      upper: takes what is written there; without it nothing can be written.
      work: an empty folder of the same file system as `upper`, for the kernel.

    Raises: ConfigError when this process, kernel or folder cannot have it; StorageError.
    """
    assert lowers, "at least one"
    assert bool(upper) == bool(work), "both or none"
    folder = os.path.abspath(folder)
    lowers = [os.path.abspath(lower) for lower in lowers]
    flags = kernel.NOSUID | kernel.NODEV
    if not upper and len(lowers) == 1:
        _bind(lowers[0], folder, flags | kernel.RDONLY)
        return
    if not upper:
        flags |= kernel.RDONLY
    paths = [*lowers, *(os.path.abspath(path) for path in (upper, work) if path)]
    data = _options(paths, len(lowers))
    if len(os.fsencode(data)) <= kernel.MOST_DATA_BYTES and all(_PLAIN.fullmatch(path) for path in paths):
        kernel.mount("bootseer", folder, "overlay", flags, data)
    else:
        _mount_by_descriptors(paths, len(lowers), folder, flags)
    if upper and os.statvfs(folder).f_flag & os.ST_RDONLY:  # the kernel makes do with less, and says so in its log
        kernel.unmount_anyway(folder)
        raise StorageError(
            f"{folder}: overlayfs cannot write to {upper} and {work}: they have to be this user's, on one file "
            "system that is no overlay, no network's and not read-only"
        )


def _mount_by_descriptors(paths: list[str], lowers: int, folder: str, flags: int) -> None:
    """For paths that options have no certain way to spell, or that are too long together."""
    fds: list[int] = []
    try:
        for path in paths:
            try:
                fds.append(os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
            except OSError as caught:
                raise kernel.mount_error(caught.errno or errno.EIO, path, folder, "overlay") from caught
        kernel.mount("bootseer", folder, "overlay", flags, _options([f"/proc/self/fd/{fd}" for fd in fds], lowers))
    finally:
        for fd in fds:
            os.close(fd)


def _options(paths: list[str], lowers: int) -> str:
    options = ["lowerdir=" + ":".join(paths[:lowers])]
    options += [f"{name}={path}" for name, path in zip(("upperdir", "workdir"), paths[lowers:], strict=False)]
    options += ["redirect_dir=nofollow", "metacopy=off"]
    if not _is_initial_user_namespace():
        options.append("userxattr")  # the marks that it would use else are root's
    return ",".join(options)


def _bind(source: str, folder: str, flags: int) -> None:
    """Shows one folder at another place. Flags are given afterwards; without them it does not stay."""
    kernel.mount(source, folder, "", kernel.BIND)
    number = kernel.try_mount("", folder, "", kernel.REMOUNT | kernel.BIND | flags)
    if number:
        kernel.unmount_anyway(folder)
        raise kernel.mount_error(number, source, folder, "")


def _is_initial_user_namespace() -> bool:
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            return file.read().split() == _INITIAL_USERS
    except OSError:
        return os.geteuid() == 0
