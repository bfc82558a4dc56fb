"""Faults of `bench faults` that come from outside of the training: signals, memory, nodes, links, clocks, names.

CLOCK_REALTIME is the same for all of a machine, so a node's wall clock is moved by a library of a few lines that
is loaded into all its processes (LD_PRELOAD, built by cc) and adds what a file says; the kernel's own times stay.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable

from bench.faults_job import Job
from bench.faults_plan import Injection
from bench.record import BenchError

CGROUP = "/sys/fs/cgroup"
MEMORY_BYTES = 256 << 20  # that a rank may take on top of what it has
GOES_S = 20.0
CLOCK_C = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <sys/syscall.h>
static long ahead(void) {
    char text[24];
    const char *path = getenv("FAULTS_CLOCK");
    int fd = path ? (int)syscall(SYS_open, path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return 0;
    long got = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    if (got <= 0) return 0;
    text[got] = 0;
    return atol(text);
}
int clock_gettime(clockid_t which, struct timespec *at) {
    int status = (int)syscall(SYS_clock_gettime, which, at);
    if (!status && (which == CLOCK_REALTIME || which == CLOCK_REALTIME_COARSE)) at->tv_sec += ahead();
    return status;
}
int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}
time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
"""


def why_not(injection: Injection) -> str:
    """Why a fault cannot be had here, "" where it can."""
    fault = injection.fault
    if fault.by == "script":
        if fault.do == "mount" and not os.path.exists("/dev/fuse"):
            return "there is no /dev/fuse"
        return ""
    if fault.do == "oom" and not _memory_directory():
        return "no cgroup with memory limits"
    if fault.do == "clock" and shutil.which("cc") is None:
        return "no cc to build the clock with"
    return ""


def build_clock(directory: str) -> str:
    """The library that moves a wall clock. Returns: its path."""
    source, made = f"{directory}/clock.c", f"{directory}/clock.so"
    with open(source, "w", encoding="ascii") as file:
        file.write(CLOCK_C)
    built = subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", made, source], capture_output=True, text=True)
    if built.returncode:
        raise BenchError(f"the clock cannot be built: {built.stderr}")
    return made


def inject(job: Job) -> None:
    """Does it now."""
    fault = job.injection.fault
    WAYS[fault.do](job, job.injection)


def _signal(job: Job, injection: Injection) -> None:
    os.kill(job.pid_of(injection.rank), getattr(signal, f"SIG{injection.fault.arguments['signal']}"))


def _memory_directory() -> str:
    """Where a group with a limit of memory can be made: version 2 or 1 of cgroups."""
    if os.path.exists(f"{CGROUP}/memory/memory.limit_in_bytes"):
        return f"{CGROUP}/memory"
    try:
        with open(f"{CGROUP}/cgroup.subtree_control", encoding="ascii") as file:
            return CGROUP if "memory" in file.read().split() else ""
    except OSError:
        return ""


def _oom(job: Job, injection: Injection) -> None:
    """The rank gets a group of its own, and takes memory until that has none left."""
    group = f"{_memory_directory()}/bootseer-faults-{os.getpid()}"
    os.makedirs(group, exist_ok=True)
    limit = next(name for name in ("memory.max", "memory.limit_in_bytes") if os.path.exists(f"{group}/{name}"))
    _put(f"{group}/{limit}", MEMORY_BYTES)
    swap = f"{group}/memory.swap.max"
    if os.path.exists(swap):
        _put(swap, 0)
    _put(f"{group}/cgroup.procs", job.pid_of(injection.rank))
    with open(f"{job.folder}/grow-{injection.rank}", "w", encoding="ascii"):
        pass
    job.at_close(lambda: _remove(group))


def _remove(group: str) -> None:
    end_s = time.monotonic() + GOES_S
    while True:
        try:
            os.rmdir(group)
            return
        except OSError as error:
            if time.monotonic() > end_s:
                raise BenchError(f"{group}: {error.strerror}") from error
            time.sleep(0.05)


def _node(job: Job, injection: Injection) -> None:
    job.host(injection.node).kill()


def _link(job: Job, injection: Injection) -> None:
    host = job.host(injection.node)
    host.cut()
    seconds = injection.fault.arguments.get("seconds")
    if seconds is not None:
        job.later(float(seconds), host.join)


def _agent(job: Job, injection: Injection) -> None:
    os.kill(job.agent_pid(injection.node), signal.SIGKILL)


def _clock(job: Job, injection: Injection) -> None:
    path = f"{job.folder}/clock-{injection.node}"
    _put(f"{path}.tmp", int(injection.fault.arguments["seconds"]))
    os.replace(f"{path}.tmp", path)


def _names(job: Job, injection: Injection) -> None:
    """Neither servers nor files tell an address any more."""
    inside = ["nsenter", f"--target={job.agent_pid(injection.node)}", "--mount"]
    for path in ("/etc/resolv.conf", "/etc/hosts"):
        subprocess.run([*inside, "mount", "--bind", os.devnull, path], check=True, capture_output=True)


def _put(path: str, value: int) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(str(value))


WAYS: dict[str, Callable[[Job, Injection], None]] = {
    "signal": _signal,
    "oom": _oom,
    "node": _node,
    "link": _link,
    "agent": _agent,
    "clock": _clock,
    "names": _names,
}
