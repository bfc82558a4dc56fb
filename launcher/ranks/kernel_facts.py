"""What the kernel says of processes that died: its log, and the counters of the memory cgroup.

Looked at before an attempt and when a rank was killed; costs some system calls and never waits. The log is mostly
root's to read, and its process numbers are those of the first PID namespace, so in a container they name nobody:
what is only likely is called "maybe". Sources: Documentation/ABI/testing/dev-kmsg, cgroup-v2 (memory.events),
cgroup-v1 (memory.oom_control) of Linux.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

MOST_RECORDS = 4096  # read at once; a flood of lines is given up
MOST_RECORD_BYTES = 8192
MOST_KEPT = 4
MOST_LINE_CHARACTERS = 300
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO
_KILLED = re.compile(r"[Kk]illed process (\d+)")
_ABOUT = re.compile(r"\b[\w.-]{1,16}\[(\d+)\]:? (?:segfault|general protection|trap|bad frame)")
_ACCELERATOR = re.compile(r"NVRM: Xid|fallen off the bus")


# What a program does wrong, the driver logs as an Xid, too: the GPU is well, and no other node would help. Those
# after which NVIDIA's device plugin for Kubernetes leaves a GPU in use, as of errors of applications.
PROGRAMS_XIDS = frozenset(("13", "31", "43", "45", "68", "109"))
_XID = re.compile(r"Xid \([^)\n]*\): (\d+)")


def has_device_fault(lines: Iterable[str]) -> bool:
    """Whether the kernel's log tells of a fault of an accelerator: more than what a program can cause."""
    xids = [_XID.search(line) for line in lines if "Xid" in line or "off the bus" in line]
    return any(xid is None or xid[1] not in PROGRAMS_XIDS for xid in xids)


class KernelWord(NamedTuple):
    """What is known of a process that ended by SIGKILL or another signal of the kernel."""

    oom: str  # yes: it was killed for want of memory; maybe: somebody was; no: nobody was; "": cannot be known
    lines: tuple[str, ...]  # of the kernel's log, that are about it or about accelerators


class KernelFacts:
    """Since it was made, or last `begin`. All may fail, which means: not known."""

    def __init__(self, log_path: str = "/dev/kmsg", counters: tuple[str, ...] | None = None) -> None:
        self._log_fd = _open_at_end(log_path)
        self._counters = find_counters() if counters is None else counters
        self._before = self._count()
        self._lines: list[str] = []
        self._knows_pids = _is_first_pid_namespace()

    def begin(self) -> None:
        """Another attempt: what was before is no news."""
        self._read_log()
        self._lines.clear()
        self._before = self._count()

    def of(self, pid: int) -> KernelWord:
        """What the kernel says of a process that has ended."""
        self._read_log()
        count = self._count()
        killed = [line for line in self._lines if _KILLED.search(line)]
        own = [line for line in killed if self._knows_pids and _first_number(_KILLED, line) == pid]
        about = [line for line in self._lines if self._knows_pids and _first_number(_ABOUT, line) == pid]
        devices = [line for line in self._lines if _ACCELERATOR.search(line)]
        grew = count is not None and self._before is not None and count > self._before
        if own:
            oom = "yes"
        elif grew or (killed and not self._knows_pids):
            oom = "maybe"
        else:
            # A counter that did not grow is enough only together with the log: limits above ours count elsewhere.
            oom = "no" if self._log_fd is not None and self._knows_pids else ""
        devices.sort(key=lambda line: not has_device_fault([line]))  # of many, what tells most
        return KernelWord(oom, tuple((own + about + devices)[:MOST_KEPT]))

    def close(self) -> None:
        if self._log_fd is not None:
            os.close(self._log_fd)
            self._log_fd = None

    def _count(self) -> int | None:
        counts = [count for path in self._counters if (count := _read_count(path)) is not None]
        return sum(counts) if counts else None

    def _read_log(self) -> None:
        if self._log_fd is None:
            return
        for _ in range(MOST_RECORDS):
            try:
                record = os.read(self._log_fd, MOST_RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # what was next has been overwritten: the read after it goes on behind
            except OSError:
                return
            if not record:
                return
            for raw in record.decode(errors="replace").splitlines():
                line = raw.partition(";")[2] or raw
                if _KILLED.search(line) or _ABOUT.search(line) or _ACCELERATOR.search(line):
                    self._lines.append(line[:MOST_LINE_CHARACTERS])
                    del self._lines[:-64]


def find_counters(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> tuple[str, ...]:
    """Files that count out-of-memory kills in the cgroup of this process; () where there are none."""
    try:
        with open(own, encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return ()
    for number, controllers, path in (line for line in lines if len(line) == 3):
        if ".." in path.split("/"):
            continue
        if number == "0":
            folders, name = [root, f"{root}/unified"], "memory.events"
        elif "memory" in controllers.split(","):
            folders, name = [f"{root}/memory"], "memory.oom_control"
        else:
            continue
        for folder in folders:
            # In a container the path is often that of the host, and what is mounted is our own.
            here = path
            while True:
                found = os.path.join(folder, here.strip("/"), name) if here.strip("/") else f"{folder}/{name}"
                if _read_count(found) is not None:
                    return (found,)
                if not here.strip("/"):
                    break
                here = os.path.dirname(here.rstrip("/"))
    return ()


def _read_count(path: str) -> int | None:
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                name, _, value = line.partition(" ")
                if name == "oom_kill":
                    return int(value)
    except (OSError, ValueError):
        pass
    return None


def _open_at_end(path: str) -> int | None:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    try:
        os.lseek(fd, 0, os.SEEK_END)
    except OSError:
        os.close(fd)
        return None
    return fd


def _is_first_pid_namespace() -> bool:
    try:
        return os.readlink("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _first_number(pattern: re.Pattern[str], line: str) -> int:
    match = pattern.search(line)
    return int(match[1]) if match else -1
