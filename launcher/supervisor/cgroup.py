"""A cgroup v2 for the job, if one can be made: its `cgroup.kill` ends all processes in it at once.

The watchdog makes it and stays outside; the supervisor enters it before it starts ranks. It sets no limit and
enables no controller. It is not used under Slurm, which tracks the processes of a step by its own cgroups.
"""

from __future__ import annotations

import errno
import os
import time

EMPTY_S = 0.5  # until killed processes are gone
NAME = "bootseer-"
OLD_S = 60.0  # a supervisor has entered its own by then
MAX_LEFT = 64  # maximum that one job removes


def make() -> str | None:
    """Make a cgroup below that of this process; return None if that is not possible."""
    if "SLURM_JOB_ID" in os.environ:
        return None
    try:
        path = _own_cgroup()
        if path is None:
            return None
        # The pid alone is not unique: a job in another PID namespace may have it at the same time.
        path = f"{path}/{NAME}{os.getpid()}-{os.urandom(4).hex()}"
        os.mkdir(path)
    except (OSError, ValueError):
        return None
    if os.path.exists(f"{path}/cgroup.kill"):
        return path
    os.rmdir(path)
    return None


def enter(path: str | None) -> bool:
    """Move this process into the cgroup; return False if the kernel does not allow it."""
    return path is not None and _write(f"{path}/cgroup.procs", b"0")


def leave(path: str | None) -> None:
    """Move this process out of the cgroup, and remove the cgroup with the processes that remain inside."""
    if path is not None and _write(f"{os.path.dirname(path)}/cgroup.procs", b"0"):
        remove(path)


def remove(path: str | None) -> None:
    """Kill the processes inside, and remove the cgroup."""
    if path is None:
        return
    _write(f"{path}/cgroup.kill", b"1")
    end_s = time.monotonic() + EMPTY_S
    while True:
        try:
            os.rmdir(path)
        except OSError as error:
            # Killed processes need a moment. One that waits in the kernel is left; an empty cgroup costs nothing.
            if error.errno == errno.EBUSY and time.monotonic() < end_s:
                time.sleep(0.005)
                continue
        return


def remove_left(path: str | None) -> None:
    """Remove empty cgroups beside `path`, of jobs that were killed together with their watchdog."""
    if path is None:
        return
    now_s, count = time.time(), 0
    try:
        with os.scandir(os.path.dirname(path)) as found:
            for each in found:
                if not each.name.startswith(NAME) or each.path == path or count >= MAX_LEFT:
                    continue
                # The time of the first access: the kernel does not report when a cgroup was made.
                if now_s - each.stat(follow_symlinks=False).st_mtime > OLD_S:
                    try:
                        os.rmdir(each.path)
                        count += 1
                    except OSError:
                        pass  # its job runs
    except OSError:
        pass  # another job does the same


def _own_cgroup() -> str | None:
    """Return the directory of this process's v2 cgroup."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        own = [line[3:].rstrip("\n") for line in file if line.startswith("0::")]
    if not own or ".." in own[0].split("/"):
        return None
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            if rest.startswith("cgroup2 "):
                root, directory = fields.split(" ")[3:5]
                if root != "/" and not own[0].startswith(root):
                    return None
                inner = own[0] if root == "/" else own[0][len(root) :]
                return directory + inner.rstrip("/")
    return None


def _write(path: str, data: bytes) -> bool:
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, data)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True
