"""Total and free memory: the machine's, and what cgroups leave to this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import NamedTuple

from bootseer.linux.cgroups import directories, read_text

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
