"""Facts about a node's cgroups, descriptors, disks and mounts, for host.py, read through the host interface."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from bootseer.health.host_interface import HostInterface
from bootseer.linux.cgroups import levels

_MAX_ANCESTORS = 64
_MAX_PROCESSES = 512  # of a job that are inspected
_OPEN_FILES = re.compile(r"^Max open files\s+(\d+)", re.MULTILINE)


class CgroupLevel(NamedTuple):
    """One directory of a cgroup hierarchy; None for values that it does not limit or report."""

    folder: str
    pids_used: int | None
    pids_limit: int | None
    quota_cpus: float | None
    periods: int
    throttled: int  # of the periods


class FileFacts(NamedTuple):
    soft_limit: int
    used: int | None  # by all processes
    most: int | None
    locked_bytes: int | None  # that may be locked; None for no limit
    has_rdma: bool


class DescriptorFact(NamedTuple):
    pid: int
    name: str
    used: int
    limit: int


class DiskFact(NamedTuple):
    """A state or count that the kernel keeps of a disk or file system."""

    where: str
    kind: str  # state, errors, degraded
    value: str


class Mount(NamedTuple):
    point: str
    kind: str
    is_read_only: bool  # for this mount
    is_read_only_below: bool  # the file system itself


def read_cgroups(system: HostInterface) -> list[CgroupLevel]:
    """Return the cgroups of this process and those above them, both versions."""
    found = []
    for line in system.text("proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        wanted = controllers.split(",")
        if not controllers:
            mounts = ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif {"pids", "cpu"} & set(wanted):
            mounts = [f"sys/fs/cgroup/{controllers}"]
            mounts += [f"sys/fs/cgroup/{name}" for name in wanted if name != controllers]
        else:
            continue
        for mount in mounts:
            found += [_level(system, directory) for directory in levels(system.at(mount), path)]
    return found


def _level(system: HostInterface, full: str) -> CgroupLevel:
    directory = full.removeprefix(system.root.rstrip("/"))
    stat = {
        words[0]: int(words[1])
        for line in system.text(f"{directory}/cpu.stat").splitlines()
        if len(words := line.split()) == 2 and words[1].isdecimal()
    }
    return CgroupLevel(
        directory,
        system.number(f"{directory}/pids.current"),
        system.number(f"{directory}/pids.max"),
        _quota(system, directory),
        stat.get("nr_periods", 0),
        stat.get("nr_throttled", 0),
    )


def _quota(system: HostInterface, directory: str) -> float | None:
    words = system.text(f"{directory}/cpu.max").split()
    if not words:
        words = [system.text(f"{directory}/cpu.cfs_quota_us"), system.text(f"{directory}/cpu.cfs_period_us")]
    if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
        return int(words[0]) / int(words[1])
    return None


def read_files(system: HostInterface) -> FileFacts:
    words = system.text("proc/sys/fs/file-nr").split()
    is_read = len(words) == 3 and all(word.isdecimal() for word in words)
    return FileFacts(
        system.file_limit(),
        int(words[0]) if is_read else None,
        int(words[2]) if is_read else None,
        system.locked_limit_bytes(),
        bool(system.names("sys/class/infiniband")),
    )


def read_descriptors(system: HostInterface, ancestor: int) -> list[DescriptorFact]:
    """Return descriptors of the descendants of a process; only children of main threads are found."""
    found = []
    waiting = [ancestor] if ancestor else []
    for _ in range(_MAX_PROCESSES):
        if not waiting:
            break
        pid = waiting.pop()
        children = system.text(f"proc/{pid}/task/{pid}/children").split()
        waiting += [int(child) for child in children if child.isdecimal()]
        limit = _OPEN_FILES.search(system.text(f"proc/{pid}/limits"))
        used = len(system.names(f"proc/{pid}/fd"))
        if limit is not None and used:
            found.append(DescriptorFact(pid, system.text(f"proc/{pid}/comm"), used, int(limit[1])))
    return found


def read_disks(system: HostInterface) -> list[DiskFact]:
    """Return states of disks and controllers, error counts of file systems, and degraded arrays."""
    facts = []
    for name in system.names("sys/block"):
        state = system.text(f"sys/block/{name}/device/state")
        if state:
            facts.append(DiskFact(name, "state", state))
        degraded = system.number(f"sys/block/{name}/md/degraded")
        if degraded is not None:
            facts.append(DiskFact(name, "degraded", str(degraded)))
    facts += [
        DiskFact(name, "state", state)
        for name in system.names("sys/class/nvme")
        if (state := system.text(f"sys/class/nvme/{name}/state"))
    ]
    facts += [
        DiskFact(name, "errors", str(count))
        for name in system.names("sys/fs/ext4")
        if (count := system.number(f"sys/fs/ext4/{name}/errors_count")) is not None
    ]
    for pool in system.names("sys/fs/btrfs"):
        for device in system.names(f"sys/fs/btrfs/{pool}/devinfo"):
            text = system.text(f"sys/fs/btrfs/{pool}/devinfo/{device}/error_stats")
            if text:
                count = sum(int(number) for number in re.findall(r"\d+", text))
                facts.append(DiskFact(f"{pool}:{device}", "errors", str(count)))
    return facts


def read_mounts(system: HostInterface) -> list[Mount]:
    """Return the mounts of this process; of stacked mounts the topmost."""
    found: dict[str, Mount] = {}
    for line in system.text("proc/self/mountinfo").splitlines():
        before, dash, after = line.partition(" - ")
        fields, below = before.split(" "), after.split(" ")
        if dash and len(fields) >= 6 and len(below) >= 3:
            point = re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), fields[4])
            found[point] = Mount(point, below[0], "ro" in fields[5].split(","), "ro" in below[-1].split(","))
    return list(found.values())


def find_descendants(system: HostInterface, pids: Iterable[int], ancestor: int) -> frozenset[int]:
    """Return those of `pids` that descend from `ancestor`."""
    return frozenset(pid for pid in pids if ancestor and _descends(system, pid, ancestor))


def _descends(system: HostInterface, pid: int, ancestor: int) -> bool:
    for _ in range(_MAX_ANCESTORS):
        if pid == ancestor:
            return True
        fields = system.text(f"proc/{pid}/stat").rpartition(")")[2].split()
        if len(fields) < 2 or not fields[1].isdecimal():
            return False  # it has ended, or is of another PID namespace
        pid = int(fields[1])
    return False
