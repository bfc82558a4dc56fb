"""Where a process that leaves its cgroup goes, from what the kernel tells."""

from __future__ import annotations

import pytest

from bootseer.linux.mount import Mount, parse_mounts
from bootseer.mounts.tree_daemon.cgroup import own_path, top_of

UNIFIED = b"30 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = b"41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
LEGACY = b"35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
INNER = b"50 40 0:26 /docker/ab /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw\n"
DEEP = b"51 40 0:26 /docker /mnt/docker\\040x rw - cgroup2 cgroup rw\n"
OUTSIDE = b"52 40 0:26 /../.. /sys/fs/cgroup rw - cgroup2 cgroup rw\n"


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (
            "0::/system.slice/slurmstepd.scope/job_7/step_0/user\n",
            "/system.slice/slurmstepd.scope/job_7/step_0/user",
        ),
        ("5:devices:/a\n1:name=systemd:/b\n0::/c\n", "/c"),
        ("4:memory:/a\n", ""),
        ("0::/\n", "/"),
        ("0::/../other\n", ""),
        ("", ""),
    ],
)
def test_own_path(text: str, path: str) -> None:
    assert own_path(text) == path


@pytest.mark.parametrize(
    ("text", "own", "top"),
    [
        (UNIFIED, "/user.slice/x.scope", "/sys/fs/cgroup"),
        (LEGACY + HYBRID, "/x", "/sys/fs/cgroup/unified"),
        (LEGACY, "/x", ""),
        (INNER, "/docker/ab", ""),
        (INNER, "/docker/ab/job", "/sys/fs/cgroup"),
        (INNER, "/docker/abc/job", ""),
        (INNER + DEEP, "/docker/ab/job", "/mnt/docker x"),
        (OUTSIDE, "/x", ""),
        (b"", "/x", ""),
    ],
)
def test_top(text: bytes, own: str, top: str) -> None:
    found: list[Mount] = parse_mounts(text)
    assert top_of(found, own) == top
