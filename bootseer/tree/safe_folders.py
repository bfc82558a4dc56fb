"""Folders below a root, opened name by name and never through a symbolic link: no path leads out of the root.

Whatever others do inside the root at the same time, a descriptor from here is that of a folder which was below it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def open_root(path: str | bytes) -> Iterator[int]:
    """The root itself, which may be reached through links. Raises: OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def open_folder(root_fd: int, names: Sequence[bytes]) -> Iterator[int]:
    """A folder below the root, open as long as the block. Raises: OSError, ENOTDIR or ELOOP for a link."""
    fd = step_into(root_fd, names)
    try:
        yield fd
    finally:
        os.close(fd)


def step_into(root_fd: int, names: Sequence[bytes]) -> int:
    """The same, to be closed by the caller."""
    fd = os.open(b".", FOLDER, dir_fd=root_fd)
    for name in names:
        try:
            below = os.open(name, FOLDER, dir_fd=fd)
        finally:
            os.close(fd)
        fd = below
    return fd


class LastFolder:
    """The folder that was opened last stays open: files come folder by folder. For one thread."""

    def __init__(self, root_fd: int) -> None:
        self._root_fd = root_fd
        self._names: Sequence[bytes] | None = None
        self._fd = -1

    def __enter__(self) -> LastFolder:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def open(self, names: Sequence[bytes]) -> int:
        """Good until the next call."""
        if names != self._names:
            self._close()
            self._fd = step_into(self._root_fd, names)
            self._names = names
        return self._fd

    def _close(self) -> None:
        if self._names is not None:
            self._names = None
            os.close(self._fd)


class OpenFolders:
    """Folders that were opened stay open, so many of them, and those below are opened from them. For one thread.

    For trees that nobody else changes: a folder that is moved meanwhile is still the one that is written to.
    """

    def __init__(self, root_fd: int, most: int = 64) -> None:
        self._root_fd = root_fd
        self._most = most
        self._fds: dict[Sequence[bytes], int] = {}  # the one that was used last comes last

    def __enter__(self) -> OpenFolders:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, names: Sequence[bytes]) -> int:
        """Good until the next call."""
        fd = self._fds.pop(names, None)
        if fd is None:
            if not names:
                return self._root_fd
            fd = os.open(names[-1], FOLDER, dir_fd=self.open(names[:-1]))
        self._fds[names] = fd
        if len(self._fds) > self._most:
            os.close(self._fds.pop(next(iter(self._fds))))
        return fd

    def close(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()


def attribute_path(folder_fd: int, name: bytes) -> bytes:
    """A path of a name in an open folder, for calls that take no descriptor of a folder; /proc is needed."""
    return b"/proc/self/fd/%d/%s" % (folder_fd, name)
