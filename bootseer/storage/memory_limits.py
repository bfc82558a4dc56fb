"""How much memory there is, and how much of it is free: the machine's, and what cgroups leave this process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

LEAST_FREE = 4  # if less than one part in so many is free, that is what binds
UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2**63 for "no limit"
MAX_LEVELS = 64  # of nested cgroups that are looked at


class Memory(NamedTuple):
    """What there is: the machine's, or what the tightest cgroup leaves of it."""

    total_bytes: int
    free_bytes: int  # could be taken now without driving anybody out
    limited_by: str  # "the machine", or the cgroup's folder


def tightest(machine: Memory, cgroups: list[Memory]) -> Memory:
    """The least of all, separately for what there is and what is free."""
    everything = [machine, *cgroups]
    total = min(everything, key=lambda memory: memory.total_bytes)
    free = min(everything, key=lambda memory: memory.free_bytes)
    culprit = free if free.free_bytes < total.total_bytes // LEAST_FREE else total
    return Memory(total.total_bytes, free.free_bytes, culprit.limited_by)


def read_memory(root: str = "/") -> Memory:
    """The machine and all cgroups that this process is in. `root`: where proc and sys are, for tests."""
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


def parse_cgroup_v2(folder: str, limit: str, high: str, usage: str, stat: str) -> Memory | None:
    """None where there is no limit. Clean file pages count as free: the kernel gives them up first."""
    limits = [int(text) for text in (limit.strip(), high.strip()) if text.isdigit()]
    return _cgroup(folder, min(limits, default=UNLIMITED), usage, _stat(stat, "inactive_file"))


def parse_cgroup_v1(folder: str, limit: str, usage: str, stat: str) -> Memory | None:
    bound = int(limit) if limit.strip().isdigit() else UNLIMITED
    return _cgroup(folder, bound, usage, _stat(stat, "total_inactive_file"))


def _cgroup(folder: str, limit: int, usage: str, reclaimable: int) -> Memory | None:
    if limit >= UNLIMITED:
        return None
    used = int(usage) if usage.strip().isdigit() else 0
    return Memory(limit, max(0, min(limit, limit - used + reclaimable)), f"the cgroup {folder}")


def _stat(text: str, name: str) -> int:
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[0] == name and words[1].isdigit():
            return int(words[1])
    return 0


def _cgroups(root: str) -> Iterator[Memory | None]:
    for line in read_text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                for folder in levels(os.path.join(root, mount), path):
                    yield parse_cgroup_v2(
                        folder,
                        *(read_text(f"{folder}/memory.{name}") for name in ("max", "high", "current", "stat")),
                    )
        elif "memory" in controllers.split(","):
            for folder in levels(os.path.join(root, "sys/fs/cgroup/memory"), path):
                names = ("limit_in_bytes", "usage_in_bytes", "stat")
                yield parse_cgroup_v1(folder, *(read_text(f"{folder}/memory.{name}") for name in names))


def levels(mount: str, path: str) -> Iterator[str]:
    """The cgroup's folder and all above it. In a container the mount itself is often the cgroup."""
    parts = [part for part in path.split("/") if part and part != ".."][:MAX_LEVELS]
    for count in range(len(parts), -1, -1):
        folder = os.path.join(mount, *parts[:count])
        if os.path.isdir(folder):
            yield folder


def read_text(path: str) -> str:
    """Of a file of the kernel, "" where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(1 << 20)
    except OSError:
        return ""  # this kernel or container does not say: no limit known from here
