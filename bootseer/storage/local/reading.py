"""Reads of a range of a file of the operating system, in the calling thread.

Cold bytes bypass the page cache (O_DIRECT) and go straight into the target if offset and address have the same
alignment. Warm bytes and unaligned ends go through the cache. The file's version must not change during the read.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat as stat_bits
import threading

from bootseer.errors import NotFound, SourceChanged, StorageError, Truncated
from bootseer.linux.page_cache import cached_share
from bootseer.storage.engine.revocable_buffer import address_of, copy_bytes
from bootseer.storage.os_errors import map_os_errors, to_storage_error
from bootseer.storage.protocol import Stat

BLOCK_BYTES = 4096  # alignment of offset, length and address for O_DIRECT; never more in practice
MIN_DIRECT_BYTES = 64 << 10  # below it, the cache's read-ahead is more useful
WARM_SHARE = 0.5  # cached share of the range from which on reads use the cache
BOUNCE_BYTES = 1 << 20  # fits a core's cache, so the copy out of it is cheap

_REFUSED_DIRECT = (errno.EINVAL, errno.ENOTSUP)
_of_thread = threading.local()


def stat_of(status: os.stat_result) -> Stat:
    """Return size and version: inode, time of the last write, size."""
    return Stat(status.st_size, f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}")


def stat_file(full: str) -> Stat:
    """Return the version of a file. Raises: NotFound, also for directories."""
    with map_os_errors(full):
        status = os.stat(full)
    return stat_of(_check_kind(status, full))


def read_range(full: str, offset: int, target: memoryview, etag: str, refused: set[int]) -> tuple[str, int]:
    """Fill `target`; return the version of the file, and the number of bytes that bypassed the page cache.

    `refused`: devices without O_DIRECT; `read_range` adds those that it finds.

    Raises: Truncated; SourceChanged when the file is not the version `etag`, or changes during the read.
    """
    with map_os_errors(full):
        # O_NONBLOCK, so that a pipe with the name of a file does not block.
        fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = _check_kind(os.fstat(fd), full)
        seen = stat_of(status)
        if etag and seen.etag != etag:
            raise SourceChanged(f"{full}: the file has changed since the read began; start the read again")
        if offset + len(target) > seen.size:
            raise Truncated(f"{full}: bytes {offset} to {offset + len(target)} of a file of {seen.size}")
        around = 0
        try:
            if (
                len(target) >= MIN_DIRECT_BYTES
                and status.st_dev not in refused
                and cached_share(fd, offset, len(target)) < WARM_SHARE
            ):
                around = _read_around(full, fd, offset, target, refused, status.st_dev)
            if not around:
                _read_through(full, fd, offset, target, 0, len(target))
        finally:
            if stat_of(os.fstat(fd)) != seen:
                raise SourceChanged(f"{full}: the file changed during the read; start again when it is complete")
        return seen.etag, around
    finally:
        os.close(fd)


def _read_around(full: str, fd: int, offset: int, target: memoryview, refused: set[int], device: int) -> int:
    """Read all; return how many bytes bypassed the cache: 0, with nothing read, if O_DIRECT is unavailable."""
    try:
        around_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno in _REFUSED_DIRECT:
            refused.add(device)
        return 0  # on any other error the file is read normally, which reports the reason
    try:
        head = -offset % BLOCK_BYTES
        end = head + (len(target) - head) // BLOCK_BYTES * BLOCK_BYTES
        if (address_of(target) - offset) % BLOCK_BYTES == 0:
            done = _read_direct(full, around_fd, offset, target, head, end)
        else:
            done = _read_bounced(full, around_fd, offset, target, head, end)
        if done is None:
            refused.add(device)
            return 0
    finally:
        os.close(around_fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # do not read ahead around the ends
    _read_through(full, fd, offset, target, 0, head)
    _read_through(full, fd, offset, target, done, len(target))
    return done - head


def _read_direct(full: str, fd: int, offset: int, target: memoryview, start: int, end: int) -> int | None:
    """Read whole blocks; return the end of the bytes read, or None if the file system refuses."""
    at = start
    while at < end:
        try:
            count = os.preadv(fd, [target[at:end]], offset + at)
        except OSError as error:
            if error.errno in _REFUSED_DIRECT and at == start:
                return None
            raise to_storage_error(error, f"{full} at byte {offset + at}") from error
        at += count
        if count == 0 or count % BLOCK_BYTES:
            break  # the rest goes through the cache, which distinguishes the end of the file from other reasons
    return at


def _read_bounced(full: str, fd: int, offset: int, target: memoryview, start: int, end: int) -> int | None:
    """Do the same through an aligned buffer."""
    bounce = _bounce()
    at = start
    while at < end:
        length = min(BOUNCE_BYTES, end - at)
        done = _read_direct(full, fd, offset + at, bounce, 0, length)
        if done is None:
            return None
        copy_bytes(target[at : at + done], bounce[:done])
        at += done
        if done < length:
            break
    return at


def _bounce() -> memoryview:
    """Return the buffer of this thread; kept, because filling memory for the first time costs more than a copy."""
    bounce: memoryview | None = getattr(_of_thread, "bounce", None)
    if bounce is None:
        bounce = memoryview(mmap.mmap(-1, BOUNCE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        _of_thread.bounce = bounce
    return bounce


def _read_through(full: str, fd: int, offset: int, target: memoryview, start: int, end: int) -> None:
    at = start
    while at < end:
        try:
            count = os.preadv(fd, [target[at:end]], offset + at)
        except OSError as error:
            raise to_storage_error(error, f"{full} at byte {offset + at}") from error
        if count == 0:
            raise Truncated(f"{full}: ends at byte {offset + at}, and was longer before")
        at += count


def _check_kind(status: os.stat_result, full: str) -> os.stat_result:
    if stat_bits.S_ISDIR(status.st_mode):
        raise NotFound(f"{full}: is a directory, not a file")
    if not stat_bits.S_ISREG(status.st_mode):
        raise StorageError(f"{full}: is a device, a pipe or a socket, not a file")
    return status
