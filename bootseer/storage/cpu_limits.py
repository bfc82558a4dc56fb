"""How many processors this process can keep busy: those that it may run on, or as many as cgroups let it use.

A container's quota (docker --cpus, CPUQuota of systemd, limits of Kubernetes) leaves all processors to be seen.
More threads than it has room for are all stopped together when it is used up.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

from bootseer.storage.memory_limits import levels, read_text


def usable_cores(root: str = "/") -> int:
    """1 or more; a part of a processor counts as one. `root`: where proc and sys are, for tests."""
    quota = min(_quotas(root), default=math.inf)
    allowed = len(os.sched_getaffinity(0))
    return allowed if quota >= allowed else max(1, math.ceil(quota))


def _quotas(root: str) -> Iterator[float]:
    """Of the cgroups of this process and of those above them, in processors."""
    for line in read_text(os.path.join(root, "proc/self/cgroup")).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for mount in ("sys/fs/cgroup", "sys/fs/cgroup/unified"):
                for folder in levels(os.path.join(root, mount), path):
                    yield from parse_quota(read_text(f"{folder}/cpu.max"))
        elif "cpu" in controllers.split(","):
            for mount in dict.fromkeys((f"sys/fs/cgroup/{controllers}", "sys/fs/cgroup/cpu")):
                for folder in levels(os.path.join(root, mount), path):
                    names = ("cfs_quota_us", "cfs_period_us")
                    yield from parse_quota(" ".join(read_text(f"{folder}/cpu.{name}") for name in names))


def parse_quota(text: str) -> list[float]:
    """`QUOTA PERIOD`, both in microseconds, as processors; [] for no limit (`max`, -1) and for anything else."""
    words = text.split()
    if len(words) != 2 or not all(word.isascii() and word.isdecimal() for word in words):
        return []
    quota_us, period_us = int(words[0]), int(words[1])
    return [quota_us / period_us] if quota_us and period_us else []
