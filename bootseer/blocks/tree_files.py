"""The files of one cached tree: opened, created, or repaired after a crash, a power cut or a full disk.

In: the tree's directory, whose `lock` is held for use. Out: open files of the right sizes and a presence bitmap
that can be trusted. One process at a time does it; other users of the tree only see marks disappear meanwhile.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from typing import NamedTuple

from bootseer.blocks.presence import HEADER_BYTES, decode_saved, is_of_boot, make_header
from bootseer.linux.locks import unlock, wait_lock
from bootseer.tree.index import BLOCK_BYTES

LOCK, INDEX, DATA, PRESENT, SUMS, SAVED = "lock", "index", "data", "present", "sums", "saved"
TEMPORARY = ".tmp-"
# Bytes of `lock`, far behind those of blocks: for use of the tree (shared), repair of its files, save.
USE_BYTE, SETUP_BYTE, SAVE_BYTE = 1 << 40, (1 << 40) + 1, (1 << 40) + 2
SETUP_TIMEOUT_S = 10.0
_OLD_S = 3600.0  # a temporary file is abandoned after it
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
# Checksums (CRC32C) of cached data: every read verifies the granules that it covers. They find damage by a disk, a
# crash or a full file system; the SHA-256 of the data was verified when it was fetched.
GRANULE_SHIFT = 14
GRANULE_BYTES = 1 << GRANULE_SHIFT  # a read verifies at least so much; most reads of a start are 4 to 64 KiB
BLOCK_GRANULES = BLOCK_BYTES // GRANULE_BYTES
BLOCK_CHECKSUMS = struct.Struct(f"<{BLOCK_GRANULES}I")  # as they are stored

Buffer = memoryview | bytes | bytearray
UNKNOWN = 0  # no granule has this checksum


def as_checksum(found: int) -> int:
    """Return the checksum of a granule with this CRC32C: none is UNKNOWN."""
    return found or 1


def checksum_block(crc32c: Callable[[Buffer], int], data: Buffer) -> tuple[int, ...]:
    """Return the checksums of a whole block of BLOCK_BYTES."""
    view = memoryview(data)
    return tuple(crc32c(view[at : at + GRANULE_BYTES]) or 1 for at in range(0, BLOCK_BYTES, GRANULE_BYTES))


class TreeFiles(NamedTuple):
    """Open files; -1 for all where a tree cannot be cached."""

    lock: int = -1
    present: int = -1
    sums: int = -1
    data: int = -1

    def dup(self) -> TreeFiles:
        """Duplicate the descriptors, which stay open when these close. Both share locks. Raises: OSError."""
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
        """Close all files, the lock last: while it is held the tree is not evicted."""
        for fd in (self.data, self.sums, self.present, self.lock):
            if fd >= 0:
                os.close(fd)


def open_files(directory: str, tree: str, block_count: int, boot_id: str, lock: int) -> TreeFiles:
    """Open the files of a tree; the result owns `lock` if the call succeeds.

    Raises: OSError; TimeoutError when another process repairs the tree and does not finish.
    """
    if not wait_lock(lock, SETUP_BYTE, timeout_s=SETUP_TIMEOUT_S):
        raise TimeoutError(f"another process has been repairing {directory} for {SETUP_TIMEOUT_S:g} s")
    opened: list[int] = []
    try:
        for name in (PRESENT, SUMS, DATA):
            opened.append(os.open(os.path.join(directory, name), _OPEN, 0o600))
        present, sums, data = opened
        is_new = os.fstat(sums).st_size != block_count * BLOCK_CHECKSUMS.size
        if is_new:
            _make_zeros(sums, block_count * BLOCK_CHECKSUMS.size)
        if os.fstat(data).st_size != block_count * BLOCK_BYTES:
            os.ftruncate(data, block_count * BLOCK_BYTES)  # missing bytes then fail their checksums
        size = os.fstat(present).st_size
        is_right = size == HEADER_BYTES + block_count and is_of_boot(
            os.pread(present, HEADER_BYTES, 0), boot_id, block_count
        )
        if is_new or not is_right:
            marks = None if is_new else _read_saved(directory, tree, block_count)
            _make_map(present, marks, boot_id, block_count)
        _remove_old(directory)
    except BaseException:
        for fd in opened:
            os.close(fd)
        raise
    finally:
        unlock(lock, SETUP_BYTE)
    return TreeFiles(lock, present, sums, data)


def write_whole(directory: str, name: str, data: bytes) -> None:
    """Write a small file to disk atomically. Raises: OSError."""
    path = os.path.join(directory, name)
    temporary = os.path.join(directory, f"{TEMPORARY}{name}-{os.getpid()}-{time.monotonic_ns():x}")
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
            pass  # it was not made, or was renamed
        raise
    _sync_directory(directory)


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data`. Raises: OSError; on a full disk after a part of it was written."""
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def size_on_disk(directory: str) -> int:
    """Return the bytes on disk of the files of a directory, not their lengths; unreadable ones count as 0."""
    total = 0
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                except OSError:
                    pass  # a temporary file, or a failing disk
    except OSError:
        pass  # it is gone, or cannot be read: its readers report that
    return total


def _make_map(fd: int, marks: bytes | None, boot_id: str, block_count: int) -> None:
    """Write a map, its header last: without it the map is invalid."""
    _make_zeros(fd, HEADER_BYTES + block_count)
    if marks is not None:
        write_at(fd, marks, HEADER_BYTES)
    write_at(fd, make_header(boot_id, block_count), 0)


def _make_zeros(fd: int, size: int) -> None:
    """Fill a file with zeros and allocate it, so that a full disk is found now and not at a later write."""
    os.ftruncate(fd, 0)
    if size:
        os.posix_fallocate(fd, 0, size)


def _read_saved(directory: str, tree: str, block_count: int) -> bytes | None:
    try:
        fd = os.open(os.path.join(directory, SAVED), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with open(fd, "rb") as file:
        return decode_saved(file.read(block_count + 4096), tree, block_count)


def _remove_old(directory: str) -> None:
    """Remove temporary files of killed writers."""
    with os.scandir(directory) as entries:
        for entry in entries:
            try:
                if entry.name.startswith(TEMPORARY) and time.time() - entry.stat().st_mtime > _OLD_S:
                    os.unlink(entry.path)
            except FileNotFoundError:
                pass  # its writer has just renamed it


def _sync_directory(directory: str) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
