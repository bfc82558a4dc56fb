"""What /proc says of one process, without waiting for it: no file is read that takes the lock of its memory.

In: pids. Out: plain values, None or "" where it is gone or not ours to look at. What a stuck process can block
(cmdline, environ, maps) is not touched here.
"""

from __future__ import annotations

import os
from typing import NamedTuple

MOST_BYTES = 8192
STOPPED = ("T", "t")  # by a signal, by a debugger
GONE = ("Z", "X", "x")


class Stat(NamedTuple):
    """A line of /proc/PID/stat."""

    state: str  # of the main thread
    parent: int
    cpu_ticks: int  # of all threads, those that have ended too
    waited_ticks: int  # of children that have ended and were waited for, and of theirs
    start_ticks: int  # since boot


class Signals(NamedTuple):
    """Masks of /proc/PID/status: bit n - 1 is signal n."""

    pending: int
    blocked: int  # of the main thread
    caught: int


def parse_stat(data: bytes) -> Stat | None:
    # The name stands in brackets and may itself hold brackets and blanks.
    fields = data.rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    user, system, user_waited, system_waited = map(int, fields[11:15])
    return Stat(fields[0].decode(), int(fields[1]), user + system, user_waited + system_waited, int(fields[19]))


def read_stat(pid: int) -> Stat | None:
    """None when there is no such process."""
    return parse_stat(read(f"/proc/{pid}/stat"))


def read_signals(pid: int) -> Signals | None:
    """None when there is no such process."""
    masks = {}
    for line in read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(b":\t")
        if name in (b"SigPnd", b"ShdPnd", b"SigBlk", b"SigCgt"):
            masks[name] = int(value, 16)
    if len(masks) < 4:
        return None
    return Signals(masks[b"SigPnd"] | masks[b"ShdPnd"], masks[b"SigBlk"], masks[b"SigCgt"])


def read_wait(pid: int) -> str:
    """The kernel function in which the main thread waits; "" when it does not, or it is not told."""
    return parse_wait(read(f"/proc/{pid}/wchan"))


def parse_wait(data: bytes) -> str:
    return "" if data in (b"", b"0") else data.decode(errors="replace").strip()


def read_kernel_stack(pid: int) -> tuple[str, ...]:
    """Kernel functions of the main thread, innermost first; only root may see more than one."""
    found = []
    for line in read(f"/proc/{pid}/stack").decode(errors="replace").splitlines():
        words = line.split()
        if len(words) > 1:
            found.append(words[1].partition("+")[0])
    wait = read_wait(pid)
    return tuple(found) or ((wait,) if wait else ())


def is_same_file(pid: int, number: int, fd: int) -> bool:
    """Whether a descriptor of another process is the file that `fd` is here."""
    try:
        there, here = os.stat(f"/proc/{pid}/fd/{number}"), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def read(path: str) -> bytes:
    """b"" where it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, MOST_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)
