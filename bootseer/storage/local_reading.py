"""One range of a file of the operating system, read in the calling thread.

Cold bytes go around the page cache (O_DIRECT) straight into the target where offset and address lie alike in a
block; warm ones, and the odd ends, go through it. The file must be the same version before and after.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat as stat_bits
import threading

from bootseer.errors import NotFound, SourceChanged, StorageError, Truncated
from bootseer.storage.landing import address_of, copy_bytes
from bootseer.storage.os_errors import map_os_errors, to_storage_error
from bootseer.storage.page_cache import cached_share
from bootseer.storage.protocol import Stat

BLOCK_BYTES = 4096  # what O_DIRECT wants offset, length and address to be multiples of; never more in practice
LEAST_DIRECT_BYTES = 64 << 10  # below it the cache's read-ahead is worth more
WARM_SHARE = 0.5  # of the range in the page cache: from here on it is read through it
BOUNCE_BYTES = 1 << 20  # fits a core's own cache, so the copy out of it is cheap

_REFUSED_DIRECT = (errno.EINVAL, errno.ENOTSUP)
_of_thread = threading.local()


def stat_of(status: os.stat_result) -> Stat:
    """Size and version: inode, time of the last write, size."""
    return Stat(status.st_size, f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}")


def stat_file(full: str) -> Stat:
    """Raises: NotFound also for folders."""
    with map_os_errors(full):
        status = os.stat(full)
    return stat_of(_check_kind(status, full))


def read_range(full: str, offset: int, target: memoryview, etag: str, refused: set[int]) -> tuple[str, int]:
    """Fills `target`; gives the version that it read, and the bytes that went around the page cache.

    `refused`: devices that take no O_DIRECT; what is found out is added.

    Raises: Truncated; SourceChanged when the file is not the version `etag`, or changed while it was read.
    """
    with map_os_errors(full):
        # Not to wait for the other end of a pipe that has the name of a file.
        fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = _check_kind(os.fstat(fd), full)
        seen = stat_of(status)
        if etag and seen.etag != etag:
            raise SourceChanged(f"{full}: is another version than the one that is being read; start again with it")
        if offset + len(target) > seen.size:
            raise Truncated(f"{full}: bytes {offset} to {offset + len(target)} of a file of {seen.size}")
        around = 0
        try:
            if (
                len(target) >= LEAST_DIRECT_BYTES
                and status.st_dev not in refused
                and cached_share(fd, offset, len(target)) < WARM_SHARE
            ):
                around = _read_around(full, fd, offset, target, refused, status.st_dev)
            if not around:
                _read_through(full, fd, offset, target, 0, len(target))
        finally:
            if stat_of(os.fstat(fd)) != seen:
                raise SourceChanged(f"{full}: was written to while it was read; start again when it is complete")
        return seen.etag, around
    finally:
        os.close(fd)


def _read_around(full: str, fd: int, offset: int, target: memoryview, refused: set[int], device: int) -> int:
    """Reads all; gives how many bytes went around the cache, 0 (and nothing read) where that cannot be."""
    try:
        around_fd = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        if error.errno in _REFUSED_DIRECT:
            refused.add(device)
        return 0  # for any other reason the file itself is read, which tells what is wrong
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
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # nobody asks for what lies around the ends
    _read_through(full, fd, offset, target, 0, head)
    _read_through(full, fd, offset, target, done, len(target))
    return done - head


def _read_direct(full: str, fd: int, offset: int, target: memoryview, start: int, end: int) -> int | None:
    """Reads whole blocks; gives how far it came, None if the file system refuses."""
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
            break  # the rest goes through the cache, which tells the end of the file from anything else
    return at


def _read_bounced(full: str, fd: int, offset: int, target: memoryview, start: int, end: int) -> int | None:
    """The same by way of memory that lies right."""
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
    """Memory of this thread; kept, because memory that was never touched costs more to fill than a copy does."""
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
        raise NotFound(f"{full}: is a folder, not a file")
    if not stat_bits.S_ISREG(status.st_mode):
        raise StorageError(f"{full}: is a device, a pipe or a socket, not a file")
    return status
