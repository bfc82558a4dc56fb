"""Page cache and file system of a file: they decide how a local file is read.

Bypassing a warm page cache loses its speed; reading a cold file through it costs ten times the CPU. A call on a
network file system can hang forever; one on a local disk practically never does.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

from bootseer.linux.syscalls import libc

PAGE_BYTES = 4096
_CACHESTAT = 451  # the system call's number, the same on all machines; Linux 6.5
_PROBES = 8  # pages probed where cachestat is missing
_AT_ONCE_S = 30e-6  # a page in memory is copied in some 3 us; from the fastest disks it takes 50 or more

# Parts of the names of file systems on a network or in a user process.
_REMOTE = (
    "nfs",
    "cifs",
    "smb",
    "fuse",
    "lustre",
    "ceph",
    "gpfs",
    "beegfs",
    "9p",
    "virtiofs",
    "afs",
    "gfs",
    "orange",
)

_has_cachestat = sys.platform == "linux"


def cached_share(fd: int, offset: int, length: int) -> float:
    """Return the cached share of a range of an open file, 0 to 1. Reads next to nothing."""
    if length <= 0:
        return 1.0
    cached = _cached_pages(fd, offset, length)
    if cached is None:
        return _probed_share(fd, offset, length)
    pages = (offset + length - 1) // PAGE_BYTES - offset // PAGE_BYTES + 1
    return min(1.0, cached / pages)


def is_cached(fd: int, offset: int) -> bool | None:
    """Return whether the page of a byte is in the page cache; None if unknown without waiting."""
    cached = _cached_pages(fd, offset, 1)
    return _is_read_at_once(fd, offset) if cached is None else cached > 0


def _cached_pages(fd: int, offset: int, length: int) -> int | None:
    """Return the number of cached pages; None if this kernel does not report it, or not for this file."""
    global _has_cachestat
    if _has_cachestat:
        span = (ctypes.c_uint64 * 2)(offset, length)
        counts = (ctypes.c_uint64 * 5)()  # cached, dirty, in writeback, evicted, recently evicted
        if libc().syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), span, counts, ctypes.c_uint(0)) == 0:
            return int(counts[0])
        if ctypes.get_errno() == 38:  # ENOSYS: an older kernel. Other errors concern this file only.
            _has_cachestat = False
    return None


def _probed_share(fd: int, offset: int, length: int) -> float:
    """Estimate the share by non-blocking reads of single bytes.

    A miss makes the kernel fetch that page. So each call probes random pages: the same ones would appear warm to
    the next reader.
    """
    from bootseer.jitter import randrange

    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a miss fetches no more than that page
    found = sum(bool(_is_read_at_once(fd, offset + randrange(length))) for _ in range(_PROBES))
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
    return found / _PROBES


def _is_read_at_once(fd: int, offset: int) -> bool | None:
    """Return whether a byte was read without waiting, at memory speed; None if this file system cannot do that.

    On a miss the kernel starts a fetch and checks again; a fast disk has answered by then.
    """
    began_s = time.perf_counter()
    try:
        count = os.preadv(fd, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return count == 1 and time.perf_counter() - began_s < _AT_ONCE_S


def is_remote(path: str) -> bool:
    """Return whether a path, or its existing part, lies on a network file system or one of a process."""
    return is_remote_kind(_kind_of(path))


def is_in_memory(path: str) -> bool:
    """Return whether files at this path occupy memory."""
    return _kind_of(path) in ("tmpfs", "ramfs")


def is_remote_kind(kind: str) -> bool:
    """Return whether a kind of file system, as in mountinfo, is remote."""
    return any(part in kind for part in _REMOTE)


def _kind_of(path: str) -> str:
    """Return the kind of file system of a path, or of its existing part; "" if unknown."""
    while True:
        try:
            device = os.stat(path).st_dev
            break
        except OSError:
            above = os.path.dirname(path)
            if above == path:
                return ""
            path = above
    return _file_system(device) or ""


def _file_system(device: int) -> str | None:
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                before, _, after = line.partition(" - ")
                if before.split(" ", 3)[2] == wanted:
                    return after.split(" ", 1)[0]
    except (OSError, IndexError):
        pass
    return None
