"""Directories below a root, opened name by name and never through a symbolic link: no path leads out of the root.

Even if other processes change the root meanwhile, each descriptor is of a directory that was below it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

MAX_OPEN = 64
DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_root(path: str | bytes) -> Iterator[int]:
    """Open the root itself, which may be reached through links. Raises: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_directory(root_fd: int, names: Sequence[bytes]) -> Iterator[int]:
    """Open a directory below the root for the block. Raises: OSError, ENOTDIR or ELOOP for a link."""
    fd = open_below(root_fd, names)
    try:
        yield fd
    finally:
        os.close(fd)


def open_below(root_fd: int, names: Sequence[bytes]) -> int:
    """Do the same; the caller closes it."""
    fd = os.open(b".", DIRECTORY, dir_fd=root_fd)
    for name in names:
        try:
            below = os.open(name, DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


class LastDirectory:
    """Keeps the last opened directory open, as files come directory by directory. For one thread."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._names: Sequence[bytes] | None = None
        self._fd = -1

    def __enter__(self) -> LastDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def open(self, names: Sequence[bytes]) -> int:
        """Return a descriptor, valid until the next call."""
        if names != self._names:
            self._close()
            self._fd = open_below(self._root_fd, names)
            self._names = names
        return self._fd

    def _close(self) -> None:
        if self._names is not None:
            self._names = None
            os.close(self._fd)


class OpenDirectories:
    """Keeps up to `most` directories open, and opens those below from them. For one thread.

    For trees that no other process changes: writes still go to a directory after it has been moved.
    """

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._fds: dict[Sequence[bytes], int] = {}  # least recently used first

    def __enter__(self) -> OpenDirectories:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, names: Sequence[bytes]) -> int:
        """Return a descriptor, valid until the next call."""
        fd = self._fds.pop(names, None)
        if fd is None:
            if not names:
                return self._root_fd
            fd = os.open(names[-1], DIRECTORY, dir_fd=self.open(names[:-1]))
        self._fds[names] = fd
        if len(self._fds) > MAX_OPEN:
            os.close(self._fds.pop(next(iter(self._fds))))
        return fd

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def attribute_path(directory_fd: int, name: bytes) -> bytes:
    """Return a path of a name in an open directory, for calls without a directory descriptor. It needs /proc."""
    return b"/proc/self/fd/%d/%s" % (directory_fd, name)
