"""The host interface of all checks: proc, sys, the kernel's log, clock, limits, disks, NVIDIA's library.

Checks read facts only through it, so tests can replace the files and the library. Files of proc and sys are
bounded. A missing or unreadable fact is "" or None.
Sources: proc(5), Documentation/ABI/testing/dev-kmsg, adjtimex(2).
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import threading
import time
from collections import deque
from contextlib import suppress
from typing import NamedTuple

from bootseer.linux.syscalls import libc

MAX_TEXT_BYTES = 1 << 20
MAX_LOG_LINES = 20_000  # the newest ones
_MAX_LOG_READS = 500_000  # more than the largest buffer holds
_RECORD_BYTES = 8192
MAX_LOOKUP_S = 3.0  # less than a resolver's timeout
_FAR_AWAY = ("192.0.2.1", 9)  # of no network (RFC 5737): by its route, a node finds its own address


class FileSystemSpace(NamedTuple):
    total_bytes: int
    free_bytes: int  # for this user
    inodes: int  # 0: not counted
    free_inodes: int
    is_read_only: bool


class ClockState(NamedTuple):
    """The kernel's state of the clock."""

    is_synchronised: bool
    offset_s: float  # still to be corrected
    error_s: float  # the kernel's bound of the error


class HostInterface:
    """The host interface. Args: root: parent of proc, sys, dev and run; nvml: path or name of NVIDIA's library."""

    def __init__(self, root: str = "/", nvml: str = "libnvidia-ml.so.1") -> None:
        self.root = root
        self.nvml = nvml

    def at(self, path: str) -> str:
        """Return a path below the root."""
        return os.path.join(self.root, path.lstrip("/"))

    def text(self, path: str) -> str:
        """Return the contents of a small file, stripped."""
        try:
            with open(self.at(path), "rb") as file:
                return file.read(MAX_TEXT_BYTES).decode(errors="replace").strip()
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        """Return the number that a file holds, decimal or hexadecimal."""
        try:
            return int(self.text(path), 0)
        except ValueError:
            return None

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(os.listdir(self.at(directory)))
        except OSError:
            return []

    def exists(self, path: str) -> bool:
        return os.path.lexists(self.at(path))

    def room(self, path: str) -> FileSystemSpace:
        """Return the space of a path's file system; may block for ever. Raises: OSError."""
        found = os.statvfs(path)
        return FileSystemSpace(
            found.f_blocks * found.f_frsize,
            found.f_bavail * found.f_frsize,
            found.f_files,
            found.f_favail,
            bool(found.f_flag & os.ST_RDONLY),
        )

    def file_limit(self) -> int:
        """Return the number of descriptors that a child process may have."""
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]

    def locked_limit_bytes(self) -> int | None:
        """Return the memory that may be locked; None: no limit."""
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        return None if limit == resource.RLIM_INFINITY else limit

    def cpus(self) -> int:
        return len(os.sched_getaffinity(0))

    def sleep(self, seconds: float) -> None:
        """Wait between two readings of a counter."""
        time.sleep(seconds)

    def now_s(self) -> float:
        """Return monotonic time, for durations."""
        return time.monotonic()

    def clock(self) -> ClockState | None:
        """Return the state of the clock; None if reading it is not permitted."""
        buffer = _Timex()
        state = libc().adjtimex(ctypes.byref(buffer))
        if state < 0:
            return None
        unit = 1e-9 if buffer.status & _STA_NANO else 1e-6
        is_synchronised = state != _TIME_ERROR and not buffer.status & _STA_UNSYNC
        return ClockState(is_synchronised, buffer.offset * unit, buffer.maxerror * 1e-6)

    def name_lookup(self) -> tuple[str, float]:
        """Return this node's address, and the seconds that the lookup of its name takes, at most MAX_LOOKUP_S.

        As torch's store looks it up: as an IPv6 address, for which /etc/hosts does not name 127.0.0.1.
        """
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect(_FAR_AWAY)  # sends nothing
                address = str(probe.getsockname()[0])
        except OSError:
            address = "127.0.0.1"  # without a route

        def look_up() -> None:
            with suppress(OSError):  # no name, which takes as long as a name
                socket.getnameinfo((f"::ffff:{address}", 0, 0, 0), 0)

        looking = threading.Thread(target=look_up, daemon=True)
        began_s = time.monotonic()
        looking.start()
        looking.join(MAX_LOOKUP_S)
        return address, time.monotonic() - began_s

    def kernel_log(self, hours: float) -> list[str] | None:
        """Return the newest kernel lines, of that many hours; None if the log is not readable."""
        try:
            fd = os.open(self.at("dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
        except OSError:
            return None
        since_us = (time.clock_gettime(time.CLOCK_MONOTONIC) - hours * 3600) * 1e6
        lines: deque[str] = deque(maxlen=MAX_LOG_LINES)
        rest = b""
        try:
            for _ in range(_MAX_LOG_READS):
                try:
                    data = os.read(fd, _RECORD_BYTES)
                except BrokenPipeError:
                    continue  # the next record has been overwritten
                except BlockingIOError:
                    break
                except OSError:
                    return None
                if not data:
                    break
                whole, _, rest = (rest + data).rpartition(b"\n")
                lines.extend(_messages(whole.decode(errors="replace"), since_us))
                rest = rest[-_RECORD_BYTES:]
        finally:
            os.close(fd)
        return list(lines)


def _messages(text: str, since_us: float) -> list[str]:
    """Parse records "priority,number,microseconds,flags;message"; lines with a leading space are a dictionary."""
    found = []
    for line in text.splitlines():
        head, _, message = line.partition(";")
        fields = head.split(",")
        if message and len(fields) >= 3 and fields[2].isdecimal() and float(fields[2]) >= since_us:
            found.append(message)
    return found


_TIME_ERROR, _STA_UNSYNC, _STA_NANO = 5, 0x40, 0x2000


class _Timex(ctypes.Structure):
    """struct timex of adjtimex(2)."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("constant", ctypes.c_long),
        ("precision", ctypes.c_long),
        ("tolerance", ctypes.c_long),
        ("time", ctypes.c_long * 2),
        ("tick", ctypes.c_long),
        ("ppsfreq", ctypes.c_long),
        ("jitter", ctypes.c_long),
        ("shift", ctypes.c_int),
        ("stabil", ctypes.c_long),
        ("jitcnt", ctypes.c_long),
        ("calcnt", ctypes.c_long),
        ("errcnt", ctypes.c_long),
        ("stbcnt", ctypes.c_long),
        ("tai", ctypes.c_int),
        ("rest", ctypes.c_int * 11),
    )
