"""Writes the files of a tree into a folder that nobody sees yet, with as few system calls as there can be.

As FileWriter, but files get their names at once, folders and files that are being written stay open, and what a
new file has by itself is not set again. A small file takes four calls: open, write, its time, close.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from bootseer.storage.fallocate import reserve
from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.index import HOLE
from bootseer.tree.materialise_files import FileWriter, Part, write_all
from bootseer.tree.materialise_plan import Write
from bootseer.tree.safe_folders import OpenFolders

MOST_OPEN_FILES = 256  # that are not whole yet
# By one call. More is put into larger pages, and those a virtual machine has to ask its host for more often: the
# kernel took 1.5 to 1.7 CPU seconds for the same files by slices, 1.8 to 4.1 by blocks.
WRITE_BYTES = 32 << 10
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AGAIN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateWriter(FileWriter):
    """See the module's docstring."""

    is_apart = True  # two that write to one folder or file wait for each other

    def __init__(self, *arguments: Any) -> None:
        """As FileWriter."""
        super().__init__(*arguments)
        self._open_files: dict[int, int] = {}  # large ones that are not whole yet, by entry
        self._made_files: set[int] = set()  # large ones that were begun
        self._all_folders: list[OpenFolders] = []
        self._of_thread = threading.local()
        self._plain_modes = self._attributes.plain_modes()

    def write_empty(self, entries: Sequence[int]) -> None:
        """Files without data."""
        folders = self._open_folders()
        for entry in entries:
            with self._errors(entry):
                self._write_whole(entry, folders, [])

    def write_batch(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Fetches blocks and writes all that lies in them; bytes written and files that got whole by it.

        One block after the other, so that what was unpacked is still in the core's own cache when it is written.
        """
        if self._stopped.is_set():
            return 0, 0
        index, folders, wanted = self._index, self._open_folders(), set(numbers)
        names, parents, sizes, mtimes_ns, pieces = (
            index.names,
            index.parents,
            index.sizes,
            index.mtimes_ns,
            self._pieces,
        )
        plain_modes, links = self._plain_modes, self._links
        done = written_bytes = 0
        entry, folder, folder_fd = 0, -1, -1
        try:
            for number, raw in self._blocks.read_blocks(numbers):
                if number not in wanted:
                    raise self._other_blocks()
                wanted.remove(number)
                block = memoryview(raw)
                for write in self._writes[number]:
                    entry, _, begin, length = write
                    if pieces[entry] != 1:
                        done += self._write_part(write, block, folders)
                        folder = -1  # another one may have been opened
                        written_bytes += length
                        continue
                    if plain_modes[entry] < 0 or length != sizes[entry] or entry in links:
                        self._write_whole(entry, folders, [(write, block)])
                        folder = -1
                        done += 1
                        written_bytes += length
                        continue
                    if parents[entry] != folder:
                        folder = parents[entry]
                        folder_fd = folders.open(self._folders[folder])
                    fd = os.open(names[entry], _NEW, plain_modes[entry], dir_fd=folder_fd)
                    try:
                        piece = block[begin : begin + length]
                        if length > WRITE_BYTES or os.write(fd, piece) != length:
                            write_slices(fd, piece, 0)
                        mtime_ns = mtimes_ns[entry]
                        os.utime(fd, ns=(mtime_ns, mtime_ns))
                    finally:
                        os.close(fd)
                    done += 1
                    written_bytes += length
                if self._stopped.is_set():
                    return written_bytes, done
        except OSError as error:
            raise to_storage_error(error, self._path(entry)) from error
        if wanted:
            raise self._other_blocks()
        return written_bytes, done

    def take_away_unfinished(self) -> None:
        """The whole folder goes."""

    def close(self) -> None:
        """When no thread writes any more."""
        with self._lock:
            for folders in self._all_folders:
                folders.close()
            for fd in self._open_files.values():
                os.close(fd)
            self._all_folders.clear()
            self._open_files.clear()

    # ---- one file ------------------------------------------------------------------------------------------

    def _write_whole(self, entry: int, folders: OpenFolders, parts: Sequence[Part]) -> None:
        """One that lies in one block, or in none."""
        index = self._index
        is_plain = self._plain_modes[entry] >= 0
        folder_fd = folders.open(self._folders[index.parents[entry]])
        fd = os.open(index.names[entry], _NEW, self._plain_modes[entry] if is_plain else 0o600, dir_fd=folder_fd)
        try:
            written = 0
            for write, raw in parts:
                piece = raw[write.begin : write.begin + write.length]
                write_slices(fd, piece, write.offset)
                written += write.length
            if written != index.sizes[entry]:
                os.ftruncate(fd, index.sizes[entry])  # it ends with a hole
            if is_plain:
                mtime_ns = index.mtimes_ns[entry]
                os.utime(fd, ns=(mtime_ns, mtime_ns))
            else:
                self._attributes.set_open(entry, fd)
        finally:
            os.close(fd)
        if entry in self._links:
            self.link(entry)

    def _write_part(self, write: Write, raw: memoryview, folders: OpenFolders) -> bool:
        """Of a large file, by several threads; whether it is whole now."""
        entry = write.entry
        fd, is_kept = self._open_large(entry, folders)
        try:
            write_slices(fd, raw[write.begin : write.begin + write.length], write.offset)
            is_whole = self._is_whole(entry, 1)
            if is_whole:
                self._attributes.set_open(entry, fd)
                with self._lock:  # nobody else needs it
                    self._open_files.pop(entry, None)
                is_kept = False
        finally:
            if not is_kept:
                os.close(fd)
        if is_whole:
            self.link(entry)
        return is_whole

    def _open_large(self, entry: int, folders: OpenFolders) -> tuple[int, bool]:
        """A descriptor, and whether it stays open for others."""
        index = self._index
        folder_fd = folders.open(self._folders[index.parents[entry]])
        with self._lock:
            fd = self._open_files.get(entry, -1)
            if fd >= 0:
                return fd, True
            if entry in self._made_files:
                return os.open(index.names[entry], _AGAIN, dir_fd=folder_fd), False
            fd = os.open(index.names[entry], _NEW, 0o600, dir_fd=folder_fd)
            self._made_files.add(entry)
            is_kept = len(self._open_files) < MOST_OPEN_FILES
            if is_kept:
                self._open_files[entry] = fd
            try:
                size = index.sizes[entry]
                # With all its room at once two threads do not fight for it.
                if HOLE in index.runs[entry][::2] or not reserve(fd, size):
                    os.ftruncate(fd, size)
            except BaseException:
                if not is_kept:
                    os.close(fd)
                raise
            return fd, is_kept

    # ---- what stays open -----------------------------------------------------------------------------------

    def _open_folders(self) -> OpenFolders:
        """Of this thread."""
        folders: OpenFolders | None = getattr(self._of_thread, "folders", None)
        if folders is None:
            folders = self._of_thread.folders = OpenFolders(self._root_fd)
            with self._lock:
                self._all_folders.append(folders)
        return folders


def write_slices(fd: int, data: memoryview, offset: int) -> None:
    """Raises: OSError."""
    for begin in range(0, len(data), WRITE_BYTES):
        write_all(fd, data[begin : begin + WRITE_BYTES], offset + begin)
