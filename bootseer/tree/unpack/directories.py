"""Directories of a tree that is unpacked: private while they are filled, then given their final attributes."""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager

from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.index import Index
from bootseer.tree.unpack.attributes import Attributes
from bootseer.tree.unpack.safe_directories import LastDirectory, OpenDirectories


class TreeDirectories:
    """The directories of one run. `names`: by entry, the names on its path."""

    def __init__(
        self, index: Index, folder: str, root_fd: int, attributes: Attributes, *, is_private: bool
    ) -> None:
        """`is_private`: no other process uses them before `finish`; helpers may have made some."""
        self._index, self._directory, self._root_fd = index, folder, root_fd
        self._attributes, self._is_private = attributes, is_private
        self.names: dict[int, tuple[bytes, ...]] = {0: ()}
        for entry, mode in enumerate(index.modes):
            if entry and stat.S_ISDIR(mode):
                self.names[entry] = (*self.names[index.parents[entry]], index.names[entry])
        self._plain: Mapping[int, int] = {}  # those that lack only their time, with their modes

    def make(self, chosen: Container[int] | None = None) -> None:
        """Make all directories; private ones only if `chosen`: helpers make the others. Raises: StorageError."""
        if self._is_private:
            self._make_private(chosen)
            return
        with LastDirectory(self._root_fd) as directories:
            for entry, names in self.names.items():
                if entry:
                    with entry_errors(self._index, self._directory, entry):
                        above_fd = directories.open(names[:-1])
                        try:
                            os.mkdir(names[-1], 0o700, dir_fd=above_fd)
                        except FileExistsError:
                            self._take_over(above_fd, names[-1])

    def open(self) -> None:
        """Let programs use the existing files. Raises: StorageError."""
        with LastDirectory(self._root_fd) as directories:
            for entry, names in reversed(self.names.items()):
                with entry_errors(self._index, self._directory, entry):
                    self._attributes.set_provisional(entry, directories.open(names))

    def finish(self) -> None:
        """Finish from the leaves to the root, as no finished directory is entered again. Raises: StorageError."""
        with (OpenDirectories if self._is_private else LastDirectory)(self._root_fd) as directories:
            for entry, names in reversed(self.names.items()):
                with entry_errors(self._index, self._directory, entry):
                    if entry in self._plain:
                        mtime_ns = self._index.mtimes_ns[entry]
                        os.utime(names[-1], ns=(mtime_ns, mtime_ns), dir_fd=directories.open(names[:-1]))
                    else:
                        self._attributes.set_open(entry, directories.open(names))

    def _make_private(self, chosen: Container[int] | None) -> None:
        """Make them with their final modes, where these permit filling them."""
        self._attributes.expect_plain(self._root_fd)
        modes = self._plain = self._attributes.plain_directory_modes(self.names)
        with OpenDirectories(self._root_fd) as directories:
            for entry, names in self.names.items():
                if entry and (chosen is None or entry in chosen):
                    with entry_errors(self._index, self._directory, entry):
                        try:
                            os.mkdir(names[-1], modes.get(entry, 0o700), dir_fd=directories.open(names[:-1]))
                        except FileExistsError:
                            pass

    def _take_over(self, above_fd: int, name: bytes) -> None:
        """Take over a directory of an interrupted run, even one that this user may not open."""
        fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above_fd)
        try:
            path = f"/proc/self/fd/{fd}"
            if self._attributes.keeps_owners:
                os.chown(path, os.geteuid(), os.getegid())
            os.chmod(path, 0o700)
        finally:
            os.close(fd)


@contextmanager
def entry_errors(index: Index, directory: str, entry: int) -> Iterator[None]:
    """Map errors of the system in the block to those of an entry below the directory `directory`."""
    try:
        yield
    except OSError as error:
        raise to_storage_error(error, os.path.join(directory, os.fsdecode(index.path(entry)))) from error
