"""The state of a process in /proc, without waiting for it: no file is read that takes its memory lock.

In: pids. Out: plain values, None or "" if it has ended or belongs to another user. Files that a stuck process can
block (cmdline, environ, maps) are not read here.
"""

from __future__ import annotations

import os
from typing import NamedTuple

MAX_BYTES = 8192
STOPPED = ("T", "t")  # by a signal, by a debugger
GONE = ("Z", "X", "x")


class Stat(NamedTuple):
    """A line of /proc/PID/stat."""

    state: str  # of the main thread
    parent: int
    cpu_ticks: int  # of all threads, ended ones included
    waited_ticks: int  # of children that have ended and were waited for, and of their children
    start_ticks: int  # since boot


class Signals(NamedTuple):
    """Masks of /proc/PID/status: bit n - 1 is signal n."""

    pending: int
    blocked: int  # of the main thread
    caught: int


def parse_stat(data: bytes) -> Stat | None:
    # The name is in brackets and may itself contain brackets and blanks.
    fields = data.rpartition(b")")[2].split()
    if len(fields) < 20:
        return None
    user, system, user_waited, system_waited = map(int, fields[11:15])
    return Stat(fields[0].decode(), int(fields[1]), user + system, user_waited + system_waited, int(fields[19]))


def read_stat(pid: int) -> Stat | None:
    """Read /proc/PID/stat; None if there is no such process."""
    return parse_stat(read(f"/proc/{pid}/stat"))


def read_signals(pid: int) -> Signals | None:
    """Read the signal masks; None if there is no such process."""
    masks = {}
    for line in read(f"/proc/{pid}/status").splitlines():
        name, _, value = line.partition(b":\t")
        if name in (b"SigPnd", b"ShdPnd", b"SigBlk", b"SigCgt"):
            masks[name] = int(value, 16)
    if len(masks) < 4:
        return None
    return Signals(masks[b"SigPnd"] | masks[b"ShdPnd"], masks[b"SigBlk"], masks[b"SigCgt"])


def read_wait(pid: int) -> str:
    """Read the kernel function in which the main thread waits; "" if it does not, or that is unknown."""
    return parse_wait(read(f"/proc/{pid}/wchan"))


def parse_wait(data: bytes) -> str:
    return "" if data in (b"", b"0") else data.decode(errors="replace").strip()


def read_kernel_stack(pid: int) -> tuple[str, ...]:
    """Read the kernel functions of the main thread, innermost first; only root may see more than one."""
    found = []
    for line in read(f"/proc/{pid}/stack").decode(errors="replace").splitlines():
        words = line.split()
        if len(words) > 1:
            found.append(words[1].partition("+")[0])
    wait = read_wait(pid)
    return tuple(found) or ((wait,) if wait else ())


def is_same_file(pid: int, number: int, fd: int) -> bool:
    """Return whether a descriptor of another process is the same file as `fd` here."""
    try:
        there, here = os.stat(f"/proc/{pid}/fd/{number}"), os.fstat(fd)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def read(path: str) -> bytes:
    """Read a file; b"" if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(fd, MAX_BYTES)
    except OSError:
        return b""
    finally:
        os.close(fd)
