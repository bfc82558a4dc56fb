"""Processes: attributes of this one (prctl, limits), and those below it, found by /proc and signalled by pidfd.

Standard library and light_typing only: the launch path imports it. A process that made itself a subreaper
(`become_subreaper`) is the ancestor of every process it ever started, also of daemons in sessions of their own. So
no process is left exactly when `waitpid` fails with ECHILD.
"""

from __future__ import annotations

import os
from _ctypes import call_function, dlopen, dlsym  # ctypes itself costs a start more than a millisecond

from bootseer.light_stdlib import signal
from bootseer.light_typing import Iterator, NamedTuple

_SHELLS = frozenset(("sh", "bash", "dash", "ash", "busybox", "ksh", "ksh93", "mksh", "zsh"))
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_SET_NO_NEW_PRIVS = 38
_MAX_NAME_BYTES = 15


def _prctl(option: int, value: int | bytes) -> int:
    own = dlopen(None, 0)  # type: ignore[arg-type]  # what this process has loaded
    return int(call_function(dlsym(own, "prctl"), (option, value, 0, 0, 0)))


def become_subreaper() -> None:
    """Make orphans among the descendants of this process its children."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_death_signal(signum: int) -> None:
    """Have the kernel send a signal to this process when its parent ends; not if that has happened already."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def die_with_parent(signum: int, parent: int) -> None:
    """Set the death signal; end this process at once if `parent` has already ended."""
    set_death_signal(signum)
    if os.getppid() != parent:
        os._exit(128 + signum)


def set_name(name: bytes) -> None:
    """Set the name that ps and top show (at most 15 bytes)."""
    _prctl(_PR_SET_NAME, name[:_MAX_NAME_BYTES])


def forbid_new_privileges() -> bool:
    """Make set-user-ID programs gain nothing below this process; return whether the kernel agreed."""
    return _prctl(_PR_SET_NO_NEW_PRIVS, 1) == 0


class Process(NamedTuple):
    """One line of /proc/PID/stat."""

    pid: int
    name: str
    state: str
    parent: int
    session: int
    start_ticks: int


def read_process(pid: int) -> Process | None:
    """Return the entry of `pid` in /proc, None when it is gone."""
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
    """Return the children of a single-threaded process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb", buffering=0) as file:
            return [int(child) for child in file.read().split()]
    except OSError:  # it is gone, or the kernel was built without this file
        return [process.pid for process in _list_processes() if process.parent == pid]


def is_shell(pid: int) -> bool:
    """Return whether `pid` is a shell, which acts on a signal only between the programs that it runs."""
    try:
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")) in _SHELLS
    except OSError:
        return False


def run_by_shell(pid: int) -> list[Process]:
    """Return the programs that `pid`, and shells below it, run, if it is a shell."""
    found = []
    for child in list_children(pid) if is_shell(pid) else ():
        if (process := read_process(child)) is not None:
            found += [process, *run_by_shell(child)]
    return found


def has_handler(pid: int, signum: int) -> bool:
    """Return whether `pid` has a handler for the signal."""
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            mask = file.read().partition(b"\nSigCgt:")[2].split(None, 1)[0]
    except (OSError, IndexError):
        return True
    return bool(int(mask, 16) >> (signum - 1) & 1)


def list_descendants(root: int) -> list[Process]:
    """Return all live descendants of `root`, parents before children; zombies are left out."""
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
    """Signal `process` unless it has ended, even if another process has its pid by now."""
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
    """Return the environment with which `pid` was started; empty when it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
            data = file.read()
    except OSError:
        return {}
    pairs = (item.partition(b"=") for item in data.split(b"\0") if item)
    return {name: value for name, _, value in pairs}


def wait_channel(pid: int) -> str:
    """Return where in the kernel `pid` waits (its wait channel), "" when it cannot be read."""
    try:
        with open(f"/proc/{pid}/wchan", encoding="ascii", errors="replace") as file:
            return file.read().strip("0\n")
    except OSError:
        return ""


def allow_files(most: int) -> int:
    """Raise this process's limit of open files to at most `most`; return the limit, at most `most`."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return most
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)
