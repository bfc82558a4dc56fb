"""Writes regular files from blocks, in threads: under a temporary name until the last byte is there."""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bootseer.errors import IntegrityError
from bootseer.storage.os_errors import to_storage_error
from bootseer.tree.index import BLOCK_BYTES, Index
from bootseer.tree.materialise_attributes import Attributes
from bootseer.tree.materialise_plan import Plan, Write, apart, batches
from bootseer.tree.safe_folders import LastFolder

if TYPE_CHECKING:
    from bootseer.tree.reading import BlockSource

BATCH_BLOCKS = 32  # that a thread has in memory
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AGAIN = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC

Folders = Mapping[int, tuple[bytes, ...]]  # names on the way to each folder
Part = tuple[Write, memoryview]  # a piece of a file, and the block that it is in


class FileWriter:
    """Files of one run. `folder` names it in errors; `links`: further names of entries."""

    def __init__(
        self,
        index: Index,
        folder: str,
        root_fd: int,
        folders: Folders,
        prefix: bytes,
        todo: Plan,
        attributes: Attributes,
        links: Mapping[int, Sequence[int]],
        blocks: BlockSource,
    ) -> None:
        self._index = index
        self._folder = folder
        self._root_fd = root_fd
        self._folders = folders
        self._prefix = prefix
        self._writes = todo.writes
        self._pieces = todo.pieces
        self._attributes = attributes
        self._links = links
        self._blocks = blocks
        self._lock = threading.Lock()
        self._left = dict(todo.pieces)  # writes that a file still needs
        self._begun: dict[int, tuple[int, int] | None] = {}  # entry -> its file by device and number, once made
        self._stopped = threading.Event()

    is_apart = False  # threads do not work side by side

    def write_empty(self, entries: Sequence[int]) -> None:
        """Files without data."""
        with LastFolder(self._root_fd) as folders:
            for entry in entries:
                with self._errors(entry):
                    self._write(entry, folders, [])

    def write_batch(self, numbers: Sequence[int]) -> tuple[int, int]:
        """Fetches blocks and writes all that lies in them; bytes written and files that got whole by it."""
        if self._stopped.is_set():
            return 0, 0
        parts = self._read(numbers)
        done = written_bytes = 0
        with LastFolder(self._root_fd) as folders:
            for entry in sorted(parts):
                if self._stopped.is_set():
                    break
                with self._errors(entry):
                    done += self._write(entry, folders, parts[entry])
                written_bytes += sum(write.length for write, _ in parts[entry])
        return written_bytes, done

    def _read(self, numbers: Sequence[int]) -> dict[int, list[Part]]:
        """What lies in these blocks, by file."""
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
        return IntegrityError(f"{self._folder}: other blocks came than those that were asked for")

    def stop(self) -> None:
        """Nothing more is begun."""
        self._stopped.set()

    def link(self, entry: int) -> None:
        """The further names of a file that has its first one."""
        if entry in self._links:
            with self._errors(entry):
                link_names(self._root_fd, self._index, self._folders, entry, self._links)

    def take_away_unfinished(self) -> None:
        """After an error, when no thread writes any more. What cannot be taken away a later run does."""
        with LastFolder(self._root_fd) as folders:
            for entry in self._begun:
                try:
                    os.unlink(self._temporary(entry), dir_fd=self._open_folder(folders, entry))
                except OSError:
                    pass

    def close(self) -> None:
        """When no thread writes any more."""

    # ---- one file ------------------------------------------------------------------------------------------

    def _write(self, entry: int, folders: LastFolder, parts: Sequence[Part]) -> bool:
        """Whether the file is whole now."""
        folder_fd = self._open_folder(folders, entry)
        temporary = self._temporary(entry)
        fd = self._open(entry, folder_fd, temporary, is_all=len(parts) == self._pieces[entry])
        try:
            for write, raw in parts:
                write_all(fd, raw[write.begin : write.begin + write.length], write.offset)
            is_whole = self._is_whole(entry, len(parts))
            if is_whole:
                self._attributes.set_open(entry, fd)
        finally:
            os.close(fd)
        if is_whole:
            os.rename(temporary, self._index.names[entry], src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
            with self._lock:
                del self._begun[entry]
            self.link(entry)
        return is_whole

    def _open(self, entry: int, folder_fd: int, temporary: bytes, *, is_all: bool) -> int:
        """The temporary file, made by whoever comes first."""
        if is_all:
            with self._lock:
                self._begun[entry] = None
            return self._make(entry, folder_fd, temporary)
        with self._lock:
            identity = self._begun.get(entry)
            if identity is None:
                self._begun[entry] = None
                fd = self._make(entry, folder_fd, temporary)
                self._begun[entry] = _identity(fd)
                return fd
        fd = os.open(temporary, _AGAIN, dir_fd=folder_fd)
        if _identity(fd) != identity:
            os.close(fd)
            raise IntegrityError(f"{self._path(entry)}: somebody else changes files in {self._folder}")
        return fd

    def _make(self, entry: int, folder_fd: int, temporary: bytes) -> int:
        try:
            fd = os.open(temporary, _NEW, 0o600, dir_fd=folder_fd)
        except FileExistsError:  # of an interrupted run
            remove(folder_fd, temporary)
            fd = os.open(temporary, _NEW, 0o600, dir_fd=folder_fd)
        try:
            if self._index.sizes[entry] > BLOCK_BYTES or not self._pieces[entry]:  # there may be holes
                os.ftruncate(fd, self._index.sizes[entry])
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _is_whole(self, entry: int, count: int) -> bool:
        """After so many more writes."""
        with self._lock:
            self._left[entry] -= count
            return not self._left[entry]

    def _open_folder(self, folders: LastFolder, entry: int) -> int:
        return folders.open(self._folders[self._index.parents[entry]])

    def _temporary(self, entry: int) -> bytes:
        return b"%s%x" % (self._prefix, entry)

    def _path(self, entry: int) -> str:
        return os.path.join(self._folder, os.fsdecode(self._index.path(entry)))

    @contextmanager
    def _errors(self, entry: int) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise to_storage_error(error, self._path(entry)) from error


def run_batches(writer: FileWriter, blocks: Sequence[int], threads: int) -> Generator[tuple[int, int], None, None]:
    """Writes what lies in these blocks; (bytes, files) of each batch. All threads have ended when it ends."""
    todo = list(batches(blocks, BATCH_BLOCKS))
    if writer.is_apart:
        todo = apart(todo, threads)
    if not todo:
        return
    if threads == 1:
        for batch in todo:
            yield writer.write_batch(batch)
        return
    from concurrent.futures import ThreadPoolExecutor  # processes of unpack_helper.py start faster without

    with ThreadPoolExecutor(min(threads, len(todo)), "tree-unpack") as pool:
        try:
            for future in [pool.submit(_write_or_stop, writer, batch) for batch in todo]:
                yield future.result()
        except BaseException:
            writer.stop()
            pool.shutdown(cancel_futures=True)
            raise


def link_names(
    root_fd: int, index: Index, folders: Folders, entry: int, links: Mapping[int, Sequence[int]]
) -> None:
    """Gives a file that is there its further names."""
    with LastFolder(root_fd) as first, LastFolder(root_fd) as others:
        for other in links.get(entry, ()):
            fd = others.open(folders[index.parents[other]])
            remove(fd, index.names[other])
            os.link(
                index.names[entry],
                index.names[other],
                src_dir_fd=first.open(folders[index.parents[entry]]),
                dst_dir_fd=fd,
                follow_symlinks=False,
            )


def remove(folder_fd: int, name: bytes) -> None:
    """What an interrupted run left under the name, if anything."""
    try:
        os.unlink(name, dir_fd=folder_fd)
    except FileNotFoundError:
        pass


def _write_or_stop(writer: FileWriter, batch: Sequence[int]) -> tuple[int, int]:
    try:
        return writer.write_batch(batch)
    except BaseException:
        writer.stop()  # the others need not go on
        raise


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Raises: OSError."""
    while data:
        count = os.pwrite(fd, data, offset)
        data, offset = data[count:], offset + count


def _identity(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino
