"""What lies below a target: the attributes of every name, without data.

By descriptors, so that no link leads out of the folder, and on one file system. Names are bytes, as the system has
them. It is done twice at a start, while ranks wait, so it costs little more than the system calls: one pass of
`scandir`, one `stat` a name, one tuple for it.
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
from bootseer.tree.safe_folders import FOLDER

OURS = b".bootseer-env-"  # names at a target's top that are no part of it; see staging.py
MOST_ENTRIES = 1 << 22  # a target of so many was not meant: a tree that is mounted has all of them in memory
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EINVAL}  # or of another type by now
_ENCODING, _ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()


class Entry(NamedTuple):
    """A name below a target."""

    mode: int  # as st_mode
    uid: int
    gid: int
    size: int  # bytes; of folders 0
    mtime_ns: int
    ctime_ns: int
    ino: int
    dev: int
    nlink: int
    target: bytes  # of a symbolic link


Walk = dict[bytes, Entry]  # by path below the target, b"" for itself; parents before children


def walk(folder: str, *, without: frozenset[bytes] = frozenset()) -> Walk:
    """Everything below a folder, and itself; nothing where it does not exist.

    Args: without: paths below it that are passed over with all that is in them.
    What vanishes meanwhile is not there. Of a folder that this user may not read, only the folder itself is: what
    is in it cannot be changed by this user either. Raises: StorageError; ConfigError when it is no folder.
    """
    found: Walk = {}
    open_folders: list[tuple[int, bytes, Iterator[bytes]]] = []
    with map_os_errors(folder):
        try:
            root_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return found
        except NotADirectoryError:
            raise ConfigError(f"{folder}: is no folder: only folders can be targets of set-up commands") from None
        try:
            root = os.fstat(root_fd)
            found[b""] = _entry(root, b"")
            open_folders.append((root_fd, b"", iter(_look_into(root_fd, b"", without, found))))
            while open_folders:
                fd, above, below = open_folders[-1]
                name = next(below, None)
                if name is None:
                    open_folders.pop()
                    os.close(fd)
                    continue
                path = above + name
                try:
                    child_fd = os.open(name, FOLDER, dir_fd=fd)
                except PermissionError:
                    continue
                except OSError as error:
                    if error.errno not in _GONE:
                        raise
                    found.pop(path, None)
                    continue
                if (
                    os.fstat(child_fd).st_dev != root.st_dev
                ):  # another file system; of files overlayfs makes up devices
                    os.close(child_fd)
                    continue
                open_folders.append((child_fd, path + b"/", iter(())))
                names = _look_into(child_fd, path + b"/", without, found)
                open_folders[-1] = (child_fd, path + b"/", iter(names))
        finally:
            for fd, _, _ in open_folders:
                os.close(fd)
    return found


def _look_into(fd: int, above: bytes, without: frozenset[bytes], found: Walk) -> list[bytes]:
    """Adds everything in one folder; the names of the folders among it."""
    if len(found) > MOST_ENTRIES:
        raise KeyUnknown(
            f"more than {MOST_ENTRIES} files below a target of set-up commands: name a smaller folder"
        )
    folders = []
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
                    folders.append(name)
                target = os.readlink(name, dir_fd=fd) if kind == stat.S_IFLNK else b""
            except OSError as error:
                if error.errno in _GONE:
                    continue
                raise
            found[path] = _entry(now, target)
    return folders


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
