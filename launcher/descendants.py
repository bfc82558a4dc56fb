"""The processes below this one: found through /proc, named, signalled without hitting a recycled pid.

Used by the guard and its sentinel only; stdlib only, and light_typing. A process that made itself a subreaper
(`become_subreaper`) is the ancestor of everything it ever started, also of daemons in sessions of their own, so
"nothing is left" is exactly `waitpid` saying ECHILD.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Iterator

from bootseer.light_typing import NamedTuple

_SHELLS = frozenset(("sh", "bash", "dash", "ash", "busybox", "ksh", "ksh93", "mksh", "zsh"))
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def become_subreaper() -> None:
    """Orphans among the descendants of this process become its children from now on."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(signum: int, parent: int) -> None:
    """Sets the death signal of this process; ends it at once when `parent` is gone already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signum)


def set_name(name: bytes) -> None:
    """Sets the name that ps and top show (15 bytes)."""
    _libc.prctl(_PR_SET_NAME, name[:15], 0, 0, 0)


class Process(NamedTuple):
    """One line of /proc/PID/stat."""

    pid: int
    name: str
    state: str
    parent: int
    session: int
    start_ticks: int


def read_process(pid: int) -> Process | None:
    """What /proc says of `pid`, None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            data = file.read()
    except OSError:
        return None
    # The name stands in brackets and may itself hold brackets and blanks.
    head, _, tail = data.rpartition(b")")
    fields = tail.split()
    if len(fields) < 20:
        return None
    name = head.partition(b"(")[2].decode(errors="replace")
    return Process(pid, name, fields[0].decode(), int(fields[1]), int(fields[3]), int(fields[19]))


def list_children(pid: int) -> list[int]:
    """The children of a single-threaded process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb", buffering=0) as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # it is gone, or the kernel was built without this file
        return [process.pid for process in _list_processes() if process.parent == pid]


def is_shell(pid: int) -> bool:
    """Whether `pid` acts on a signal only between the programs that it runs."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in _SHELLS
    except OSError:
        return False


def run_by_shell(pid: int) -> list[Process]:
    """What `pid` runs, and shells below it, if it is a shell."""
    found = []
    for child in list_children(pid) if is_shell(pid) else ():
        if (process := read_process(child)) is not None:
            found += [process, *run_by_shell(child)]
    return found


def catches(pid: int, signum: int) -> bool:
    """Whether `pid` has a handler for the signal."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            mask = file.read().partition(b"\nSigCgt:")[2].split(None, 1)[0]
    except (OSError, IndexError):
        return True
    return bool(int(mask, 16) >> (signum - 1) & 1)


def list_descendants(root: int) -> list[Process]:
    """All live descendants of `root`, parents before children; zombies are left out."""
    children: dict[int, list[Process]] = {}
    for process in _list_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    waiting = [root]
    while waiting:
        for process in children.pop(waiting.pop(), ()):
            waiting.append(process.pid)
            if process.state not in "ZX":
                found.append(process)
    return found


def _list_processes() -> Iterator[Process]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (process := read_process(int(entry))) is not None:
            yield process


def send(process: Process, signum: int) -> None:
    """Signals `process` unless it has gone, also when its pid belongs to another by now."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return
    try:
        now = read_process(process.pid)
        if now is not None and now.start_ticks == process.start_ticks:
            signal.pidfd_send_signal(pidfd, signum)
    except OSError:
        pass
    finally:
        os.close(pidfd)


def read_environ(pid: int) -> dict[bytes, bytes]:
    """The environment `pid` was started with; empty when it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            data = file.read()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def waits_in(pid: int) -> str:
    """Where in the kernel `pid` waits (its wait channel), "" when it cannot be read."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
            return file.read().strip("0\n")
    except OSError:
        return ""
