"""A cgroup v2 of the job's own, where one can be made: its `cgroup.kill` ends everything in it at once.

The sentinel makes it and stays outside, the guard enters it before it starts ranks. Nothing is limited and no
controller is switched on. Left out under Slurm, which tracks the processes of a step by its own cgroups.
"""

from __future__ import annotations

import errno
import os
import time

EMPTY_S = 0.5  # for the killed to be gone
NAME = "bootseer-"
OLD_S = 60.0  # a guard has entered its own by then
MOST_LEFT = 64  # that one job removes


def make() -> str | None:
    """Makes a cgroup below the one we are in; None where that is not possible."""
    if "SLURM_JOB_ID" in os.environ:
        return None
    try:
        path = _own_cgroup()
        if path is None:
            return None
        # Our number alone is no name: in another PID namespace another job has it too, at the same time.
        path = f"{path}/{NAME}{os.getpid()}-{os.urandom(4).hex()}"
        os.mkdir(path)
    except (OSError, ValueError):
        return None
    if os.path.exists(f"{path}/cgroup.kill"):
        return path
    os.rmdir(path)
    return None


def enter(path: str | None) -> bool:
    """Moves this process in; False when the kernel does not allow it."""
    return path is not None and _write(f"{path}/cgroup.procs", b"0")


def leave(path: str | None) -> None:
    """Takes this process, which has entered it, out and removes the cgroup with what else is inside."""
    if path is not None and _write(f"{os.path.dirname(path)}/cgroup.procs", b"0"):
        remove(path)


def remove(path: str | None) -> None:
    """Kills what is still inside and removes the cgroup."""
    if path is None:
        return
    _write(f"{path}/cgroup.kill", b"1")
    end_s = time.monotonic() + EMPTY_S
    while True:
        try:
            os.rmdir(path)
        except OSError as error:
            # The killed need a moment. Who waits in the kernel for longer is left; an empty cgroup costs nothing.
            if error.errno == errno.EBUSY and time.monotonic() < end_s:
                time.sleep(0.005)
                continue
        return


def remove_left(path: str | None) -> None:
    """Removes empty ones beside `path`: of jobs that were killed together with their sentinel."""
    if path is None:
        return
    now_s, count = time.time(), 0
    try:
        with os.scandir(os.path.dirname(path)) as found:
            for each in found:
                if not each.name.startswith(NAME) or each.path == path or count >= MOST_LEFT:
                    continue
                # Counted from when it was first looked at: no kernel tells when it was made.
                if now_s - each.stat(follow_symlinks=False).st_mtime > OLD_S:
                    try:
                        os.rmdir(each.path)
                        count += 1
                    except OSError:
                        pass  # its job runs
    except OSError:
        pass  # another job does the same


def _own_cgroup() -> str | None:
    """The folder of our own v2 cgroup."""
    with open("/proc/self/cgroup", encoding="utf-8") as file:
        own = [line[3:].rstrip("\n") for line in file if line.startswith("0::")]
    if not own or ".." in own[0].split("/"):
        return None
    with open("/proc/self/mountinfo", encoding="utf-8") as file:
        for line in file:
            fields, _, rest = line.partition(" - ")
            if rest.startswith("cgroup2 "):
                root, folder = fields.split(" ")[3:5]
                if root != "/" and not own[0].startswith(root):
                    return None
                inner = own[0] if root == "/" else own[0][len(root) :]
                return folder + inner.rstrip("/")
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
