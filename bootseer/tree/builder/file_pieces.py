"""Regular files of this machine as pieces for a packer: read in its threads, by descriptors, never through a link.

In: inspected files with their identities. Out: pieces in the packer, and extents in the files' inodes. A replaced
file, or one that changes before its last byte is read, is an error that names it. Sources find the files:
from_directory.py, bootseer/env/capture/source.py.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from bootseer.errors import SourceChanged
from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.builder.building import Progress
from bootseer.tree.builder.packing import TASK_BYTES, TASK_PIECES, Packer
from bootseer.tree.index import BLOCK_BYTES, HOLE
from bootseer.tree.inodes import Inode
from bootseer.tree.unpack.safe_directories import LastDirectory, open_directory, open_root

_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_GONE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}  # the file existed a moment ago


class Identity(NamedTuple):
    """Proof that a file is the inspected one, unchanged.

    With `ctime_ns`, it also detects an edit whose mtime was restored. A new or removed name of the file (`nlink`)
    sets the ctime too, and is no change.
    """

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int | None = None
    nlink: int = 0

    def is_of(self, found: os.stat_result) -> bool:
        if (self.dev, self.ino, self.size, self.mtime_ns) != (
            found.st_dev,
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
        ):
            return False
        return self.ctime_ns is None or self.ctime_ns == found.st_ctime_ns or self.nlink != found.st_nlink


class File(NamedTuple):
    """A regular file with data."""

    folder: tuple[bytes, ...]
    name: bytes
    identity: Identity
    inode: Inode
    is_sparse: bool

    @property
    def path(self) -> bytes:
        """The path below the root."""
        return b"/".join((*self.folder, self.name))


class _Part(NamedTuple):
    """Consecutive pieces of a file."""

    file: File
    first: int  # piece of the file
    pieces: int


class FileTasks:
    """Cuts files into pieces for the packer: many small files, or a part of a large one, at a time."""

    def __init__(self, path: str, packer: Packer, on_progress: Progress) -> None:
        self._path = path
        self._packer = packer
        self._on_progress = on_progress
        self._parts: list[_Part] = []
        self._bytes = self._count = self._files = 0

    def add(self, file: File) -> None:
        done = 0
        for begin, end in _data_pieces(self._path, file):
            if begin > done:
                file.inode.add_pieces(HOLE, begin - done)
            first, done = begin, end
            while first < end:
                room = min(TASK_PIECES - self._count, -(-(TASK_BYTES - self._bytes) // BLOCK_BYTES))
                count = min(end - first, room)
                file.inode.add_pieces(self._packer.count + self._count, count)
                self._parts.append(_Part(file, first, count))
                self._count += count
                self._bytes += min(count * BLOCK_BYTES, file.identity.size - first * BLOCK_BYTES)
                first += count
                if self._count >= TASK_PIECES or self._bytes >= TASK_BYTES:
                    self.end()
        pieces = -(-file.identity.size // BLOCK_BYTES)
        if done < pieces:
            file.inode.add_pieces(HOLE, pieces - done)
        self._files += 1

    def end(self) -> None:
        """Pass the collected pieces to the packer."""
        if self._parts:
            self._packer.add_later(self._count, partial(_read, self._path, self._parts))
        self._on_progress(self._bytes, self._files)
        self._parts = []
        self._bytes = self._count = self._files = 0


def _data_pieces(path: str, file: File) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of the pieces of a file that contain data, in order."""
    pieces = -(-file.identity.size // BLOCK_BYTES)
    if not file.is_sparse:
        yield 0, pieces
        return
    with (
        source_errors(path, file.path),
        open_root(path) as root_fd,
        open_directory(root_fd, file.folder) as directory_fd,
    ):
        fd = _open(path, file, directory_fd)
        try:
            done = 0
            while (begin := _seek(fd, done * BLOCK_BYTES, os.SEEK_DATA, file.identity.size)) is not None:
                end = _seek(fd, begin, os.SEEK_HOLE, file.identity.size)
                first = max(done, begin // BLOCK_BYTES)
                done = pieces if end is None else min(pieces, -(-end // BLOCK_BYTES))
                if first < done:
                    yield first, done
                if done == pieces:
                    break
        finally:
            os.close(fd)


def _seek(fd: int, offset: int, what: int, size: int) -> int | None:
    """Return where data or a hole begins at or after `offset`; None past the end."""
    try:
        found = os.lseek(fd, offset, what)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        if error.errno != errno.EINVAL:
            raise
        found = offset if what == os.SEEK_DATA else size  # a file system without information on holes
    return found if found < size else None


def _read(path: str, parts: Sequence[_Part]) -> list[bytes]:
    """Read the pieces of all parts, in a thread."""
    pieces = []
    with source_errors(path, b""), open_root(path) as root_fd, LastDirectory(root_fd) as directories:
        for part in parts:
            file = part.file
            with source_errors(path, file.path):
                fd = _open(path, file, directories.open(file.folder))
                try:
                    for piece in range(part.first, part.first + part.pieces):
                        offset = piece * BLOCK_BYTES
                        length = min(BLOCK_BYTES, file.identity.size - offset)
                        data = os.pread(fd, length, offset)
                        while len(data) < length:
                            more = os.pread(fd, length - len(data), offset + len(data))
                            if not more:
                                raise changed(path, file.path)
                            data += more
                        pieces.append(data)
                    if not file.identity.is_of(os.fstat(fd)):
                        raise changed(path, file.path)
                finally:
                    os.close(fd)
    return pieces


def _open(path: str, file: File, directory_fd: int) -> int:
    """Open the inspected file; the caller closes it."""
    fd = os.open(file.name, _FILE, dir_fd=directory_fd)
    try:
        if not file.identity.is_of(os.fstat(fd)):
            raise changed(path, file.path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def changed(root: str, path: bytes) -> SourceChanged:
    """Return the error for a file that has changed."""
    full = os.path.join(root, os.fsdecode(path))
    return SourceChanged(f"{full}: changed while it was read: build again when nothing writes there")


@contextmanager
def source_errors(root: str, path: bytes) -> Iterator[None]:
    """Map errors of the operating system. A missing file below the root has been removed."""
    try:
        yield
    except OSError as error:
        if not path:
            raise to_storage_error(error, root) from error
        full = os.path.join(root, os.fsdecode(path))
        if error.errno in _GONE:
            raise SourceChanged(
                f"{full}: was removed while it was read: build again when nothing writes there"
            ) from error
        raise to_storage_error(error, full) from error
