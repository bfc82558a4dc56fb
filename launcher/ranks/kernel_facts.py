"""The kernel's reports of processes that died: its log, and the counters of the memory cgroup.

Read before an attempt and when a rank was killed; costs a few system calls and never waits. The log is usually
readable only by root. Its process numbers are those of the first PID namespace, so in a container they match no
process; evidence that is only likely is called "maybe". Sources: Documentation/ABI/testing/dev-kmsg, cgroup-v2
(memory.events), cgroup-v1 (memory.oom_control) of Linux.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import NamedTuple

MAX_RECORDS = 4096  # read at once; beyond that the rest of a flood of lines is left unread
MAX_RECORD_BYTES = 8192
MAX_KEPT = 4
MAX_LINE_CHARACTERS = 300
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO
_KILLED = re.compile(r"[Kk]illed process (\d+)")
_ABOUT = re.compile(r"\b[\w.-]{1,16}\[(\d+)\]:? (?:segfault|general protection|trap|bad frame)")
_ACCELERATOR = re.compile(r"NVRM: Xid|fallen off the bus")


# The driver also logs faults of programs as an Xid: the GPU is healthy, and another node would not help. After
# these codes NVIDIA's device plugin for Kubernetes leaves a GPU in use, as they are errors of applications.
PROGRAMS_XIDS = frozenset(("13", "31", "43", "45", "68", "109"))
_XID = re.compile(r"Xid \([^)\n]*\): (\d+)")


def has_device_fault(lines: Iterable[str]) -> bool:
    """Return whether the kernel's log shows a fault of an accelerator that a program cannot cause."""
    xids = [_XID.search(line) for line in lines if "Xid" in line or "off the bus" in line]
    return any(xid is None or xid[1] not in PROGRAMS_XIDS for xid in xids)


class KernelEvidence(NamedTuple):
    """The facts about a process that ended by SIGKILL or another signal of the kernel."""

    oom: str  # the OOM killer ended it: yes; maybe (it ended some process); no; "" (unknown)
    lines: tuple[str, ...]  # lines of the kernel's log about it or about accelerators


class KernelFacts:
    """Facts since its creation, or since the last `begin`. Any read may fail, which means: not known."""

    def __init__(self, log_path: str = "/dev/kmsg", counters: tuple[str, ...] | None = None) -> None:
        self._log_fd = _open_at_end(log_path)
        self._counters = find_counters() if counters is None else counters
        self._before = self._count()
        self._lines: list[str] = []
        self._knows_pids = _is_first_pid_namespace()

    def begin(self) -> None:
        """Begin another attempt: discard earlier facts."""
        self._read_log()
        self._lines.clear()
        self._before = self._count()

    def of(self, pid: int) -> KernelEvidence:
        """Return what the kernel reports of a process that has ended."""
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
            # A counter that did not grow proves this only together with the log: outer limits count elsewhere.
            oom = "no" if self._log_fd is not None and self._knows_pids else ""
        devices.sort(key=lambda line: not has_device_fault([line]))  # the strongest evidence first
        return KernelEvidence(oom, tuple((own + about + devices)[:MAX_KEPT]))

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
        for _ in range(MAX_RECORDS):
            try:
                record = os.read(self._log_fd, MAX_RECORD_BYTES)
            except BlockingIOError:
                return
            except BrokenPipeError:
                continue  # the next record was overwritten: the following read continues after it
            except OSError:
                return
            if not record:
                return
            for raw in record.decode(errors="replace").splitlines():
                line = raw.partition(";")[2] or raw
                if _KILLED.search(line) or _ABOUT.search(line) or _ACCELERATOR.search(line):
                    self._lines.append(line[:MAX_LINE_CHARACTERS])
                    del self._lines[:-64]


def find_counters(root: str = "/sys/fs/cgroup", own: str = "/proc/self/cgroup") -> tuple[str, ...]:
    """Return files that count out-of-memory kills in this process's cgroup; () if there are none."""
    try:
        with open(own, encoding="utf-8") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return ()
    for number, controllers, path in (line for line in lines if len(line) == 3):
        if ".." in path.split("/"):
            continue
        if number == "0":
            directories, name = [root, f"{root}/unified"], "memory.events"
        elif "memory" in controllers.split(","):
            directories, name = [f"{root}/memory"], "memory.oom_control"
        else:
            continue
        for directory in directories:
            # In a container the path is often the host's, while the mounted directory is this container's cgroup.
            here = path
            while True:
                found = (
                    os.path.join(directory, here.strip("/"), name) if here.strip("/") else f"{directory}/{name}"
                )
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
