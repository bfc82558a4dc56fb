"""The cgroups of this process, of both versions, and those above them; the processors and memory they leave."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

MAX_LEVELS = 64  # of nested cgroups that are inspected


def directories(root: str, controller: str) -> Iterator[tuple[int, str]]:
    """Yield the version and the directory of each visible cgroup that may limit this process.

    `root`: the parent of proc and sys, for tests.
    """
    for line in read_text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            version, mounts = 2, ["sys/fs/cgroup", "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            names = dict.fromkeys((controllers, controller))
            version, mounts = 1, [f"sys/fs/cgroup/{name}" for name in names]
        else:
            continue
        for mount in mounts:
            for directory in levels(os.path.join(root, mount), path):
                yield version, directory


def levels(mount: str, path: str) -> Iterator[str]:
    """Yield the cgroup's directory and all above it. In a container, the mount itself is often the cgroup."""
    parts = [part for part in path.split("/") if part and part != ".."][:MAX_LEVELS]
    for count in range(len(parts), -1, -1):
        directory = os.path.join(mount, *parts[:count])
        if os.path.isdir(directory):
            yield directory


def read_text(path: str) -> str:
    """Read a file of the kernel, "" if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""  # this kernel or container does not report it: no known limit


def usable_cores(root: str = "/") -> int:
    """Return the number of processors that this process can keep busy: 1 or more; a fraction counts as one.

    Under a container's quota (docker --cpus, systemd CPUQuota, Kubernetes limits) all processors stay visible.
    With more threads than the quota allows, the kernel stops all of them together once it is used up.
    `root`: the parent of proc and sys, for tests.
    """
    quota = min(_quotas(root), default=math.inf)
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota >= allowed else max(1, math.ceil(quota))


def _quotas(root: str) -> Iterator[float]:
    """Yield the quotas of this process's cgroups and of their parents, in processors."""
    for version, directory in directories(root, "cpu"):
        names = ("max",) if version == 2 else ("cfs_quota_us", "cfs_period_us")
        yield from parse_quota(" ".join(read_text(f"{directory}/cpu.{name}") for name in names))


def parse_quota(text: str) -> list[float]:
    """Convert `QUOTA PERIOD`, both in microseconds, to processors; [] for no limit (`max`, -1) or invalid text."""
    words = text.split()
    if len(words) != 2 or not all(word.isascii() and word.isdecimal() for word in words):
        return []
    quota_us, period_us = int(words[0]), int(words[1])
    return [quota_us / period_us] if quota_us and period_us else []


MIN_FREE = 4  # if less than one part in so many is free, free memory is the tightest limit
UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"


class Memory(NamedTuple):
    """Memory of the machine, or of the tightest cgroup."""

    total_bytes: int
    free_bytes: int  # available now without evicting other data
    limited_by: str  # "the machine", or the cgroup's directory


def tightest(machine: Memory, cgroups: list[Memory]) -> Memory:
    """Return the least total and the least free memory of all."""
    everything = [machine, *cgroups]
    total = min(everything, key=lambda memory: memory.total_bytes)
    free = min(everything, key=lambda memory: memory.free_bytes)
    culprit = free if free.free_bytes < total.total_bytes // MIN_FREE else total
    return Memory(total.total_bytes, free.free_bytes, culprit.limited_by)


def read_memory(root: str = "/") -> Memory:
    """Read the machine's memory and all cgroups of this process. `root`: the parent of proc and sys, for tests."""
    machine = parse_meminfo(read_text(os.path.join(root, "proc/meminfo")))
    return tightest(machine, [found for found in _cgroups(root) if found is not None])


def parse_meminfo(text: str) -> Memory:
    values = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdigit():
            values[name] = int(number[0]) * 1024
    total = values.get("MemTotal", 0)
    return Memory(total, min(total, values.get("MemAvailable", values.get("MemFree", 0))), "the machine")


def parse_cgroup_v2(directory: str, limit: str, high: str, usage: str, stat: str) -> Memory | None:
    """Return None where there is no limit. Clean file pages count as free: the kernel frees them first."""
    limits = [int(text) for text in (limit.strip(), high.strip()) if text.isdigit()]
    return _cgroup(directory, min(limits, default=UNLIMITED), usage, _stat(stat, "inactive_file"))


def parse_cgroup_v1(directory: str, limit: str, usage: str, stat: str) -> Memory | None:
    bound = int(limit) if limit.strip().isdigit() else UNLIMITED
    return _cgroup(directory, bound, usage, _stat(stat, "total_inactive_file"))


def _cgroup(directory: str, limit: int, usage: str, reclaimable: int) -> Memory | None:
    if limit >= UNLIMITED:
        return None
    used = int(usage) if usage.strip().isdigit() else 0
    return Memory(limit, max(0, min(limit, limit - used + reclaimable)), f"the cgroup {directory}")


def _stat(text: str, name: str) -> int:
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


_VERSIONS: dict[int, tuple[Callable[..., Memory | None], tuple[str, ...]]] = {
    1: (parse_cgroup_v1, ("limit_in_bytes", "usage_in_bytes", "stat")),
    2: (parse_cgroup_v2, ("max", "high", "current", "stat")),
}


def _cgroups(root: str) -> Iterator[Memory | None]:
    for version, directory in directories(root, "memory"):
        parse, names = _VERSIONS[version]
        yield parse(directory, *(read_text(f"{directory}/memory.{name}") for name in names))
