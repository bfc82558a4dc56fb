"""What the kernel holds of a file, and where the file lies: decides how a local file is read.

Reading around a warm page cache throws its speed away; reading a cold file through it costs ten times the CPU. A
call on a network file system can hang for good, one on a disk of this machine as good as never does.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time

PAGE_BYTES = 4096
_CACHESTAT = 451  # the system call's number, the same on all machines; Linux 6.5
_PROBES = 8  # pages looked at where cachestat is missing
_AT_ONCE_S = 30e-6  # a page in memory is copied in some 3 us; from the fastest disks it comes in 50 or more

# Parts of the names of file systems that stand on a network or on a process.
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

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_has_cachestat = sys.platform == "linux"


def cached_share(fd: int, offset: int, length: int) -> float:
    """How much of a range of an open file is in the page cache, 0 to 1. Reads next to nothing."""
    if length <= 0:
        return 1.0
    cached = _cached_pages(fd, offset, length)
    if cached is None:
        return _probed_share(fd, offset, length)
    pages = (offset + length - 1) // PAGE_BYTES - offset // PAGE_BYTES + 1
    return min(1.0, cached / pages)


def is_cached(fd: int, offset: int) -> bool | None:
    """Whether the page of a single byte is in the page cache; None where that can't be told without waiting."""
    cached = _cached_pages(fd, offset, 1)
    return _is_read_at_once(fd, offset) if cached is None else cached > 0


def _cached_pages(fd: int, offset: int, length: int) -> int | None:
    """None: this kernel doesn't say, or not of this file."""
    global _has_cachestat
    if _has_cachestat:
        span = (ctypes.c_uint64 * 2)(offset, length)
        counts = (ctypes.c_uint64 * 5)()  # cached, dirty, in writeback, evicted, recently evicted
        if _libc.syscall(ctypes.c_long(_CACHESTAT), ctypes.c_uint(fd), span, counts, ctypes.c_uint(0)) == 0:
            return int(counts[0])
        if ctypes.get_errno() == 38:  # ENOSYS: an older kernel. Else this file is not ours, the next one may be.
            _has_cachestat = False
    return None


def _probed_share(fd: int, offset: int, length: int) -> float:
    """Asks for single bytes that the kernel may give only without waiting.

    A miss makes the kernel fetch that page all the same, so the pages are drawn anew each time: the same ones
    would look warm to the next reader.
    """
    from random import randrange

    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # a miss fetches no more than that page
    found = sum(bool(_is_read_at_once(fd, offset + randrange(length))) for _ in range(_PROBES))  # noqa: S311
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_NORMAL)
    return found / _PROBES


def _is_read_at_once(fd: int, offset: int) -> bool | None:
    """Whether a byte came without waiting, and as fast as from memory; None if this file system can't say.

    The kernel begins to fetch a page that is not there, and looks once more: a fast disk has answered by then.
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
    """Whether a path, or the part of it that exists, lies on a network file system or one of a process."""
    return is_remote_kind(_kind_of(path))


def is_in_memory(path: str) -> bool:
    """Whether what is written there takes memory until it is removed."""
    return _kind_of(path) in ("tmpfs", "ramfs")


def is_remote_kind(kind: str) -> bool:
    """The same of a kind of file system, as mountinfo names it."""
    return any(part in kind for part in _REMOTE)


def _kind_of(path: str) -> str:
    """The file system of a path, or of the part of it that exists; "" where it cannot be told."""
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
