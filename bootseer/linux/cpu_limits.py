"""The number of processors that this process can keep busy, by CPU affinity and cgroup quotas.

Under a container's quota (docker --cpus, systemd CPUQuota, Kubernetes limits) all processors stay visible. With
more threads than the quota allows, the kernel stops all of them together once it is used up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from bootseer.linux.cgroups import directories, read_text


def usable_cores(root: str = "/") -> int:
    """Return 1 or more; a fraction of a processor counts as one. `root`: the parent of proc and sys, for tests."""
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
