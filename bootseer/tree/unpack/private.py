"""Writer of the files of a tree into a directory that is not visible yet, with as few system calls as possible.

Like FileWriter, but files get their names at once, and directories and unfinished files stay open. Attributes that
a new file has by itself are not set again. A small file takes four calls: open, write, its time, close.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from bootseer.linux.fallocate import reserve
from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.index import HOLE
from bootseer.tree.unpack.files import FileWriter, Part, write_all
from bootseer.tree.unpack.plan import Write
from bootseer.tree.unpack.safe_directories import OpenDirectories

MAX_OPEN_FILES = 256  # unfinished ones
# Per call. Larger writes use larger pages, which a virtual machine requests from its host more often: the kernel
# took 1.5 to 1.7 CPU seconds for the same files by slices, 1.8 to 4.1 by blocks.
WRITE_BYTES = 32 << 10
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AGAIN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class PrivateWriter(FileWriter):
    """A `FileWriter` for private directories; see the module's docstring."""

    is_apart = True  # two writers to one directory or file block each other

    def __init__(self, *arguments: Any) -> None:
        """Take the arguments of FileWriter."""
        super().__init__(*arguments)
        self._open_files: dict[int, int] = {}  # large unfinished ones, by entry
        self._made_files: set[int] = set()  # large ones that were started
        self._all_directories: list[OpenDirectories] = []
        self._of_thread = threading.local()
        self._plain_modes = self._attributes.plain_modes()

    def write_empty(self, entries: Sequence[int]) -> None:
        """Write files without data."""
        directories = self._open_directories()
        for entry in entries:
            with self._errors(entry):
                self._write_whole(entry, directories, [])

    def write_batch(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Fetch blocks and write their contents; return the bytes written and the number of completed files.

        Blocks are written one by one, while their data is still in the core's cache.
        """
        if self._stopped.is_set():
            return 0, 0
        index, directories, wanted = self._index, self._open_directories(), set(numbers)
        names, parents, sizes, mtimes_ns, pieces = (
            index.names,
            index.parents,
            index.sizes,
            index.mtimes_ns,
            self._pieces,
        )
        plain_modes, links = self._plain_modes, self._links
        done = written_bytes = 0
        entry, directory, directory_fd = 0, -1, -1
        try:
            for number, raw in self._blocks.read_blocks(numbers):
                if number not in wanted:
                    raise self._other_blocks()
                wanted.remove(number)
                block = memoryview(raw)
                for write in self._writes[number]:
                    entry, _, begin, length = write
                    if pieces[entry] != 1:
                        done += self._write_part(write, block, directories)
                        directory = -1  # another one may have been opened
                        written_bytes += length
                        continue
                    if plain_modes[entry] < 0 or length != sizes[entry] or entry in links:
                        self._write_whole(entry, directories, [(write, block)])
                        directory = -1
                        done += 1
                        written_bytes += length
                        continue
                    if parents[entry] != directory:
                        directory = parents[entry]
                        directory_fd = directories.open(self._directories[directory])
                    fd = os.open(names[entry], _NEW, plain_modes[entry], dir_fd=directory_fd)
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
        """Do nothing: the whole directory is deleted."""

    def close(self) -> None:
        """Close directories and files, when no thread writes any more."""
        with self._lock:
            for directories in self._all_directories:
                directories.close()
            for fd in self._open_files.values():
                os.close(fd)
            self._all_directories.clear()
            self._open_files.clear()

    # ---- one file ------------------------------------------------------------------------------------------

    def _write_whole(self, entry: int, directories: OpenDirectories, parts: Sequence[Part]) -> None:
        """Write a file that lies in one block, or in none."""
        index = self._index
        is_plain = self._plain_modes[entry] >= 0
        directory_fd = directories.open(self._directories[index.parents[entry]])
        fd = os.open(
            index.names[entry], _NEW, self._plain_modes[entry] if is_plain else 0o600, dir_fd=directory_fd
        )
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

    def _write_part(self, write: Write, raw: memoryview, directories: OpenDirectories) -> bool:
        """Write a part of a large file, for several threads; return whether it is whole now."""
        entry = write.entry
        fd, is_kept = self._open_large(entry, directories)
        try:
            write_slices(fd, raw[write.begin : write.begin + write.length], write.offset)
            is_whole = self._is_whole(entry, 1)
            if is_whole:
                self._attributes.set_open(entry, fd)
                with self._lock:  # no other thread needs it
                    self._open_files.pop(entry, None)
                is_kept = False
        finally:
            if not is_kept:
                os.close(fd)
        if is_whole:
            self.link(entry)
        return is_whole

    def _open_large(self, entry: int, directories: OpenDirectories) -> tuple[int, bool]:
        """Return a descriptor, and whether it stays open for other threads."""
        index = self._index
        directory_fd = directories.open(self._directories[index.parents[entry]])
        with self._lock:
            fd = self._open_files.get(entry, -1)
            if fd >= 0:
                return fd, True
            if entry in self._made_files:
                return os.open(index.names[entry], _AGAIN, dir_fd=directory_fd), False
            fd = os.open(index.names[entry], _NEW, 0o600, dir_fd=directory_fd)
            self._made_files.add(entry)
            is_kept = len(self._open_files) < MAX_OPEN_FILES
            if is_kept:
                self._open_files[entry] = fd
            try:
                size = index.sizes[entry]
                # Reserved at once, so that two threads do not contend for space.
                if HOLE in index.runs[entry][::2] or not reserve(fd, size):
                    os.ftruncate(fd, size)
            except BaseException:
                if not is_kept:
                    os.close(fd)
                raise
            return fd, is_kept

    # ---- open directories ----------------------------------------------------------------------------------

    def _open_directories(self) -> OpenDirectories:
        """Return the open directories of this thread."""
        directories: OpenDirectories | None = getattr(self._of_thread, "folders", None)
        if directories is None:
            directories = self._of_thread.folders = OpenDirectories(self._root_fd)
            with self._lock:
                self._all_directories.append(directories)
        return directories


def write_slices(fd: int, data: memoryview, offset: int) -> None:
    """Write data in slices. Raises: OSError."""
    for begin in range(0, len(data), WRITE_BYTES):
        write_all(fd, data[begin : begin + WRITE_BYTES], offset + begin)
