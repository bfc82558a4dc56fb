"""The cgroups of this process, of both versions, and those above them."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
