"""Writers of regular files from blocks, in threads, under temporary names until the files are whole."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bootseer.errors import IntegrityError
from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.index import BLOCK_BYTES, Index
from bootseer.tree.unpack.attributes import Attributes
from bootseer.tree.unpack.plan import Plan, Write, apart, batches
from bootseer.tree.unpack.safe_directories import LastDirectory

if TYPE_CHECKING:
    from bootseer.tree.reading import BlockSource

BATCH_BLOCKS = 32  # in memory of a thread
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AGAIN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC

Directories = Mapping[int, tuple[bytes, ...]]  # names on the path to each directory
Part = tuple[Write, memoryview]  # a piece of a file, and the block that contains it


class FileWriter:
    """Writes the files of one run. `folder` names it in errors; `links`: additional names of entries."""

    def __init__(
        self,
        index: Index,
        folder: str,
        root_fd: int,
        folders: Directories,
        prefix: bytes,
        todo: Plan,
        attributes: Attributes,
        links: Mapping[int, Sequence[int]],
        blocks: BlockSource,
    ) -> None:
        self._index = index
        self._directory = folder
        self._root_fd = root_fd
        self._directories = folders
        self._prefix = prefix
        self._writes = todo.writes
        self._pieces = todo.pieces
        self._attributes = attributes
        self._links = links
        self._blocks = blocks
        self._lock = threading.Lock()
        self._left = dict(todo.pieces)  # remaining writes of a file
        self._begun: dict[int, tuple[int, int] | None] = {}  # entry -> device and inode of its file, once made
        self._stopped = threading.Event()

    is_apart = False  # threads need not work on different parts

    def write_empty(self, entries: Sequence[int]) -> None:
        """Write files without data."""
        with LastDirectory(self._root_fd) as directories:
            for entry in entries:
                with self._errors(entry):
                    self._write(entry, directories, [])

    def write_batch(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Fetch blocks and write their contents; return the bytes written and the number of completed files."""
        if self._stopped.is_set():
            return 0, 0
        parts = self._read(numbers)
        done = written_bytes = 0
        with LastDirectory(self._root_fd) as directories:
            for entry in sorted(parts):
                if self._stopped.is_set():
                    break
                with self._errors(entry):
                    done += self._write(entry, directories, parts[entry])
                written_bytes += sum(write.length for write, _ in parts[entry])
        return written_bytes, done

    def _read(self, numbers: Sequence[int]) -> dict[int, list[Part]]:
        """Read the contents of these blocks, by file."""
        raws = dict(self._blocks.read_blocks(numbers))
        if raws.keys() != set(numbers):
            raise self._other_blocks()
        parts: dict[int, list[Part]] = {}
        for number in numbers:
            raw = memoryview(raws[number])
            for write in self._writes[number]:
                parts.setdefault(write.entry, []).append((write, raw))
        return parts

    def _other_blocks(self) -> IntegrityError:
        return IntegrityError(f"{self._directory}: received other blocks than those requested")

    def stop(self) -> None:
        """Prevent further writes from starting."""
        self._stopped.set()

    def link(self, entry: int) -> None:
        """Add the additional names of a file that has its first one."""
        if entry in self._links:
            with self._errors(entry):
                link_names(self._root_fd, self._index, self._directories, entry, self._links)

    def take_away_unfinished(self) -> None:
        """Remove unfinished files after an error, when no thread writes any more. A later run removes the rest."""
        with LastDirectory(self._root_fd) as directories:
            for entry in self._begun:
                try:
                    os.unlink(self._temporary(entry), dir_fd=self._open_directory(directories, entry))
                except OSError:
                    pass

    def close(self) -> None:
        """Release resources, when no thread writes any more."""

    # ---- one file ------------------------------------------------------------------------------------------

    def _write(self, entry: int, directories: LastDirectory, parts: Sequence[Part]) -> bool:
        """Write parts of a file; return whether it is whole now."""
        directory_fd = self._open_directory(directories, entry)
        temporary = self._temporary(entry)
        fd = self._open(entry, directory_fd, temporary, is_all=len(parts) == self._pieces[entry])
        try:
            for write, raw in parts:
                write_all(fd, raw[write.begin : write.begin + write.length], write.offset)
            is_whole = self._is_whole(entry, len(parts))
            if is_whole:
                self._attributes.set_open(entry, fd)
        finally:
            os.close(fd)
        if is_whole:
            os.rename(temporary, self._index.names[entry], src_dir_fd=directory_fd, dst_dir_fd=directory_fd)
            with self._lock:
                del self._begun[entry]
            self.link(entry)
        return is_whole

    def _open(self, entry: int, directory_fd: int, temporary: bytes, *, is_all: bool) -> int:
        """Open the temporary file; the first thread makes it."""
        if is_all:
            with self._lock:
                self._begun[entry] = None
            return self._make(entry, directory_fd, temporary)
        with self._lock:
            identity = self._begun.get(entry)
            if identity is None:
                self._begun[entry] = None
                fd = self._make(entry, directory_fd, temporary)
                self._begun[entry] = _identity(fd)
                return fd
        fd = os.open(temporary, _AGAIN, dir_fd=directory_fd)
        if _identity(fd) != identity:
            os.close(fd)
            raise IntegrityError(f"{self._path(entry)}: another process changes files in {self._directory}")
        return fd

    def _make(self, entry: int, directory_fd: int, temporary: bytes) -> int:
        try:
            fd = os.open(temporary, _NEW, 0o600, dir_fd=directory_fd)
        except FileExistsError:  # of an interrupted run
            remove(directory_fd, temporary)
            fd = os.open(temporary, _NEW, 0o600, dir_fd=directory_fd)
        try:
            if self._index.sizes[entry] > BLOCK_BYTES or not self._pieces[entry]:  # it may contain holes
                os.ftruncate(fd, self._index.sizes[entry])
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _is_whole(self, entry: int, count: int) -> bool:
        """Count writes of a file; return whether it is whole now."""
        with self._lock:
            self._left[entry] -= count
            return not self._left[entry]

    def _open_directory(self, directories: LastDirectory, entry: int) -> int:
        return directories.open(self._directories[self._index.parents[entry]])

    def _temporary(self, entry: int) -> bytes:
        return b"%s%x" % (self._prefix, entry)

    def _path(self, entry: int) -> str:
        return os.path.join(self._directory, os.fsdecode(self._index.path(entry)))

    @contextmanager
    def _errors(self, entry: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise to_storage_error(error, self._path(entry)) from error


def run_batches(writer: FileWriter, blocks: Sequence[int], threads: int) -> Generator[tuple[int, int], None, None]:
    """Write the contents of these blocks; yield (bytes, files) of each batch. All threads end with it."""
    todo = list(batches(blocks, BATCH_BLOCKS))
    if writer.is_apart:
        todo = apart(todo, threads)
    if not todo:
        return
    if threads == 1:
        for batch in todo:
            yield writer.write_batch(batch)
        return
    from concurrent.futures import ThreadPoolExecutor  # unpack_helper.py starts faster without

    with ThreadPoolExecutor(min(threads, len(todo)), "tree-unpack") as pool:
        try:
            for future in [pool.submit(_write_or_stop, writer, batch) for batch in todo]:
                yield future.result()
        except BaseException:
            writer.stop()
            pool.shutdown(cancel_futures=True)
            raise


def link_names(
    root_fd: int, index: Index, directories: Directories, entry: int, links: Mapping[int, Sequence[int]]
) -> None:
    """Add the additional names of an existing file."""
    with LastDirectory(root_fd) as first, LastDirectory(root_fd) as others:
        for other in links.get(entry, ()):
            fd = others.open(directories[index.parents[other]])
            remove(fd, index.names[other])
            os.link(
                index.names[entry],
                index.names[other],
                src_dir_fd=first.open(directories[index.parents[entry]]),
                dst_dir_fd=fd,
                follow_symlinks=False,
            )


def remove(directory_fd: int, name: bytes) -> None:
    """Remove the name that an interrupted run left, if any."""
    try:
        os.unlink(name, dir_fd=directory_fd)
    except FileNotFoundError:
        pass


def _write_or_stop(writer: FileWriter, batch: Sequence[int]) -> tuple[int, int]:
    try:
        return writer.write_batch(batch)
    except BaseException:
        writer.stop()  # other threads need not continue
        raise


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all data. Raises: OSError."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
