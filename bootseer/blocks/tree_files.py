"""The files of one cached tree, opened, made, or put in order after a crash, a power cut or a full disk.

In: the tree's folder, whose `lock` is held for use. Out: open files of the right sizes and a map that can be
believed. One process at a time does it; others that use the tree meanwhile see a map that only gets emptier.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from bootseer.blocks.locks import unlock, wait_lock
from bootseer.blocks.present import HEADER_BYTES, decode_saved, is_of_boot, make_header
from bootseer.blocks.sums import BLOCK_SUMS
from bootseer.tree.index import BLOCK_BYTES

LOCK, INDEX, DATA, PRESENT, SUMS, SAVED = "lock", "index", "data", "present", "sums", "saved"
TEMPORARY = ".tmp-"
# Bytes of `lock`, far behind those of blocks: who uses the tree (shared), who puts its files in order, who saves.
USE_BYTE, SETUP_BYTE, SAVE_BYTE = 1 << 40, (1 << 40) + 1, (1 << 40) + 2
SETUP_TIMEOUT_S = 10.0
_OLD_S = 3600.0  # a file in the making is nobody's after it
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class TreeFiles(NamedTuple):
    """Open files; -1 for all where a tree cannot be cached."""

    lock: int = -1
    present: int = -1
    sums: int = -1
    data: int = -1

    def dup(self) -> TreeFiles:
        """The same once more: whatever happens to these, those are open. Locks belong to both. Raises: OSError."""
        made: list[int] = []
        try:
            for fd in self:
                made.append(os.dup(fd))
        except BaseException:
            for fd in made:
                os.close(fd)
            raise
        return TreeFiles(*made)

    def close(self) -> None:
        """The lock last: while it is held nobody takes the tree away."""
        for fd in (self.data, self.sums, self.present, self.lock):
            if fd >= 0:
                os.close(fd)


def open_files(folder: str, tree: str, block_count: int, boot_id: str, lock: int) -> TreeFiles:
    """Opens the files of a tree; `lock` becomes theirs when it succeeds.

    Raises: OSError; TimeoutError when another process is at it and does not end.
    """
    if not wait_lock(lock, SETUP_BYTE, timeout_s=SETUP_TIMEOUT_S):
        raise TimeoutError(f"another process has been putting {folder} in order for {SETUP_TIMEOUT_S:g} s")
    opened: list[int] = []
    try:
        for name in (PRESENT, SUMS, DATA):
            opened.append(os.open(os.path.join(folder, name), _OPEN, 0o600))
        present, sums, data = opened
        is_new = os.fstat(sums).st_size != block_count * BLOCK_SUMS.size
        if is_new:
            _make_zeros(sums, block_count * BLOCK_SUMS.size)
        if os.fstat(data).st_size != block_count * BLOCK_BYTES:
            os.ftruncate(data, block_count * BLOCK_BYTES)  # what is missing then fails its sums
        size = os.fstat(present).st_size
        is_right = size == HEADER_BYTES + block_count and is_of_boot(
            os.pread(present, HEADER_BYTES, 0), boot_id, block_count
        )
        if is_new or not is_right:
            marks = None if is_new else _read_saved(folder, tree, block_count)
            _make_map(present, marks, boot_id, block_count)
        _remove_old(folder)
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    finally:
        unlock(lock, SETUP_BYTE)
    return TreeFiles(lock, present, sums, data)


def write_whole(folder: str, name: str, data: bytes) -> None:
    """Puts a small file in place, on disk, whole or not at all. Raises: OSError."""
    path = os.path.join(folder, name)
    temporary = os.path.join(folder, f"{TEMPORARY}{name}-{os.getpid()}-{time.monotonic_ns():x}")
    try:
        fd = os.open(temporary, _OPEN | os.O_EXCL, 0o600)
        try:
            write_at(fd, data, 0)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(temporary, path)
    except BaseException:
        try:
            os.unlink(temporary)
        except OSError:
            pass  # it was not made, or is in its place
        raise
    _sync_folder(folder)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """All of `data`. Raises: OSError, of a full disk after a part of it was written."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def size_on_disk(folder: str) -> int:
    """Bytes that the files of a folder take, not their lengths; of what cannot be looked at, none."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                except OSError:
                    pass  # a file in the making, or of a disk that fails
    except OSError:
        pass  # it is gone, or cannot be read: that costs its own readers, not those who count
    return total


def _make_map(fd: int, marks: bytes | None, boot_id: str, block_count: int) -> None:
    """The header comes last: without it the map counts for nothing."""
    _make_zeros(fd, HEADER_BYTES + block_count)
    if marks is not None:
        write_at(fd, marks, HEADER_BYTES)
    write_at(fd, make_header(boot_id, block_count), 0)


def _make_zeros(fd: int, size: int) -> None:
    """With room on disk, so that a full one is found now and not at a later write."""
    os.ftruncate(fd, 0)
    if size:
        os.posix_fallocate(fd, 0, size)


def _read_saved(folder: str, tree: str, block_count: int) -> bytes | None:
    try:
        fd = os.open(os.path.join(folder, SAVED), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(fd, "rb") as file:
        return decode_saved(file.read(block_count + 4096), tree, block_count)


def _remove_old(folder: str) -> None:
    """What writers left that were killed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                if entry.name.startswith(TEMPORARY) and time.time() - entry.stat().st_mtime > _OLD_S:
                    os.unlink(entry.path)
            except FileNotFoundError:
                pass  # its writer has just put it in its place


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
