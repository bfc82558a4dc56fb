"""The limits of the verdicts; docs/guide/checks.md lists and explains them. Pure."""

from __future__ import annotations

from typing import NamedTuple


class Limits(NamedTuple):
    """The limits; shares are fractions of 1."""

    memory_warn_share: float = 0.10  # available
    memory_fail_share: float = 0.02
    memory_fail_bytes: float = 256 << 20
    cgroup_warn_share: float = 0.90  # of pids.max used
    throttled_warn_share: float = 0.25  # of the cgroup's periods
    files_warn_soft: float = 4096  # descriptors a process may have
    files_fail_soft: float = 256
    files_warn_share: float = 0.90  # of the system's
    space_warn_share: float = 0.05  # free
    space_fail_bytes: float = 100 << 20
    inodes_warn_share: float = 0.05
    inodes_fail_share: float = 0.005
    shared_memory_warn_bytes: float = 1 << 30  # size of /dev/shm
    clock_warn_s: float = 0.1  # by which it may be off
    clock_fail_s: float = 1.0  # by which it is off
    errors_warn_per_s: float = 1.0  # of a NIC
    errors_fail_per_s: float = 100.0
    storage_warn_bytes_per_s: float = 20e6
    storage_warn_s: float = 1.0  # for a small write that has to reach the disk
    mount_warn_s: float = 1.0
    names_warn_s: float = 0.1  # of each rank's lookup
    accelerator_margin_c: float = 3.0  # below the temperature at which it slows down
    pair_slow_share: float = 0.2  # of the bandwidth between other nodes
    pair_enough_bytes_per_s: float = 250e6  # above it one connection measures processors, not the network
    pair_late_s: float = 0.002  # minimum excess of the round trip over that of others
    pair_lost_share: float = 0.02  # of segments, minimum
    skew_warn_s: float = 0.5  # by which a node's clock differs from the others'
    skew_fail_s: float = 60.0
