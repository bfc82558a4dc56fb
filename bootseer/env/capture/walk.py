"""A walk over a target: the attributes of every name below it, without data.

It uses descriptors, so that no link leads out of the directory, and stays on one file system. Names are bytes, as
in the system. Two walks take place at a start while ranks wait, so they cost little more than the system calls:
one pass of `scandir`, one `stat` and one tuple per name.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from typing import NamedTuple

from bootseer.errors import ConfigError, KeyUnknown
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.unpack.safe_directories import DIRECTORY

OURS = b".bootseer-env-"  # names at a target's top that are no part of it; see staging.py
MAX_ENTRIES = 1 << 22  # a larger target is a mistake; a mounted tree of this size would need too much memory
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL}  # or replaced by another type
_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


class Entry(NamedTuple):
    """The attributes of a name below a target."""

    mode: int  # as st_mode
    uid: int
    gid: int
    size: int  # bytes; of directories 0
    mtime_ns: int
    ctime_ns: int
    ino: int
    dev: int
    nlink: int
    target: bytes  # of a symbolic link


Walk = dict[bytes, Entry]  # by path relative to the target, b"" for itself; parents before children


def walk(directory: str, *, without: frozenset[bytes] = frozenset()) -> Walk:
    """Return all entries of a directory, including itself; none if it does not exist.

    Args: without: paths that are skipped with all below them. Names that vanish meanwhile are skipped. A directory
        that this user may not read is included without its content, which this user cannot change either.
    Raises: StorageError; ConfigError if it is not a directory.
    """
    found: Walk = {}
    open_directories: list[tuple[int, bytes, Iterator[bytes]]] = []
    with map_os_errors(directory):
        try:
            root_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return found
        except NotADirectoryError:
            raise ConfigError(f"{directory}: is not a directory, so it cannot be a target of set-up") from None
        try:
            root = os.fstat(root_fd)
            found[b""] = _entry(root, b"")
            open_directories.append((root_fd, b"", iter(_list_directory(root_fd, b"", without, found))))
            while open_directories:
                fd, above, below = open_directories[-1]
                name = next(below, None)
                if name is None:
                    open_directories.pop()
                    os.close(fd)
                    continue
                path = above + name
                try:
                    child_fd = os.open(name, DIRECTORY, dir_fd=fd)
                except PermissionError:
                    continue
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
                    found.pop(path, None)
                    continue
                if (
                    os.fstat(child_fd).st_dev != root.st_dev
                ):  # another file system; for files, overlayfs reports other device numbers
                    os.close(child_fd)
                    continue
                open_directories.append((child_fd, path + b"/", iter(())))
                names = _list_directory(child_fd, path + b"/", without, found)
                open_directories[-1] = (child_fd, path + b"/", iter(names))
        finally:
            for fd, _, _ in open_directories:
                os.close(fd)
    return found


def _list_directory(fd: int, above: bytes, without: frozenset[bytes], found: Walk) -> list[bytes]:
    """Add all entries of one directory. Return the names of its directories."""
    if len(found) > MAX_ENTRIES:
        raise KeyUnknown(f"more than {MAX_ENTRIES} files below a target of set-up; name a smaller directory")
    directories = []
    with os.scandir(fd) as entries:
        for each in entries:
            name = each.name.encode(_ENCODING, _ERRORS)
            path = above + name
            if (without and path in without) or (not above and name.startswith(OURS)):
                continue
            try:
                now = each.stat(follow_symlinks=False)
                kind = now.st_mode & 0o170000
                if kind == stat.S_IFDIR:
                    directories.append(name)
                target = os.readlink(name, dir_fd=fd) if kind == stat.S_IFLNK else b""
            except OSError as error:
                if error.errno in _GONE:
                    continue
                raise
            found[path] = _entry(now, target)
    return directories


def _entry(now: os.stat_result, target: bytes) -> Entry:
    mode = now.st_mode
    return Entry(
        mode,
        now.st_uid,
        now.st_gid,
        0 if mode & 0o170000 == stat.S_IFDIR else now.st_size,
        now.st_mtime_ns,
        now.st_ctime_ns,
        now.st_ino,
        now.st_dev,
        now.st_nlink,
        target,
    )
