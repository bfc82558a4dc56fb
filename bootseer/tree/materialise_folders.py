"""Folders of a tree that is unpacked: made for this user alone, given what they are to be when they are full."""

from __future__ import annotations

import os
import stat
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager

from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.index import Index
from bootseer.tree.materialise_attributes import Attributes
from bootseer.tree.safe_folders import LastFolder, OpenFolders


class TreeFolders:
    """Those of one run. `names`: by entry, the names on the way to it."""

    def __init__(
        self, index: Index, folder: str, root_fd: int, attributes: Attributes, *, is_private: bool
    ) -> None:
        """`is_private`: nobody else looks at them before `finish`; some may be there, made by helpers."""
        self._index, self._folder, self._root_fd = index, folder, root_fd
        self._attributes, self._is_private = attributes, is_private
        self.names: dict[int, tuple[bytes, ...]] = {0: ()}
        for entry, mode in enumerate(index.modes):
            if entry and stat.S_ISDIR(mode):
                self.names[entry] = (*self.names[index.parents[entry]], index.names[entry])
        self._plain: Mapping[int, int] = {}  # those that lack only their time, with their modes

    def make(self, chosen: Container[int] | None = None) -> None:
        """All; private ones only those that are chosen, if helpers make the others. Raises: StorageError."""
        if self._is_private:
            self._make_private(chosen)
            return
        with LastFolder(self._root_fd) as folders:
            for entry, names in self.names.items():
                if entry:
                    with entry_errors(self._index, self._folder, entry):
                        above_fd = folders.open(names[:-1])
                        try:
                            os.mkdir(names[-1], 0o700, dir_fd=above_fd)
                        except FileExistsError:
                            self._take_over(above_fd, names[-1])

    def open(self) -> None:
        """Programs begin to use what is there. Raises: StorageError."""
        with LastFolder(self._root_fd) as folders:
            for entry, names in reversed(self.names.items()):
                with entry_errors(self._index, self._folder, entry):
                    self._attributes.set_provisional(entry, folders.open(names))

    def finish(self) -> None:
        """From the leaves to the root: what is done needs not be entered any more. Raises: StorageError."""
        with (OpenFolders if self._is_private else LastFolder)(self._root_fd) as folders:
            for entry, names in reversed(self.names.items()):
                with entry_errors(self._index, self._folder, entry):
                    if entry in self._plain:
                        mtime_ns = self._index.mtimes_ns[entry]
                        os.utime(names[-1], ns=(mtime_ns, mtime_ns), dir_fd=folders.open(names[:-1]))
                    else:
                        self._attributes.set_open(entry, folders.open(names))

    def _make_private(self, chosen: Container[int] | None) -> None:
        """With the modes that they have in the end, where that does not hinder."""
        self._attributes.expect_plain(self._root_fd)
        modes = self._plain = self._attributes.plain_folder_modes(self.names)
        with OpenFolders(self._root_fd) as folders:
            for entry, names in self.names.items():
                if entry and (chosen is None or entry in chosen):
                    with entry_errors(self._index, self._folder, entry):
                        try:
                            os.mkdir(names[-1], modes.get(entry, 0o700), dir_fd=folders.open(names[:-1]))
                        except FileExistsError:
                            pass

    def _take_over(self, above_fd: int, name: bytes) -> None:
        """A folder that an interrupted run left. One that this user may not open can still be changed."""
        fd = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=above_fd)
        try:
            path = f"/proc/self/fd/{fd}"
            if self._attributes.keeps_owners:
                os.chown(path, os.geteuid(), os.getegid())
            os.chmod(path, 0o700)
        finally:
            os.close(fd)


@contextmanager
def entry_errors(index: Index, folder: str, entry: int) -> Iterator[None]:
    """Errors of the system in the block become those of the entry, in the folder where the tree is unpacked."""
    try:
        yield
    except OSError as error:
        raise to_storage_error(error, os.path.join(folder, os.fsdecode(index.path(entry)))) from error
