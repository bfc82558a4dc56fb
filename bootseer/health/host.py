"""Verdicts on a node: memory, cgroups, descriptors, disks, space, clock, mounts. Pure: facts in, findings out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.counted import counted
from bootseer.health.finding import FAIL, OK, UNKNOWN, WARN, Finding, if_below, one_line
from bootseer.health.limits import Limits

if TYPE_CHECKING:
    from bootseer.health.host_facts import CgroupLevel, DescriptorFact, DiskFact, FileFacts, Mount
    from bootseer.health.host_interface import ClockState, FileSystemSpace
    from bootseer.linux.cgroups import Memory

_LOCKED_ENOUGH_BYTES = 64 << 30  # an InfiniBand library pins what it sends
_MAX_PROCESSES_REPORTED = 8
_HEALTHY_STATES = {"running", "live"}  # states of SCSI disks and of NVMe controllers
_PASSING = {"new", "created", "resetting", "connecting", "blocked", "quiesce"}


def judge_memory(memory: Memory, limits: Limits) -> list[Finding]:
    """Judge the available memory, of the machine or of the tightest cgroup."""
    if not memory.total_bytes:
        return [Finding("memory", UNKNOWN, "/proc/meminfo cannot be read", way_out="mount /proc")]
    least = max(limits.memory_fail_bytes, limits.memory_fail_share * memory.total_bytes)
    enough = max(least, limits.memory_warn_share * memory.total_bytes)
    level, limit = if_below(memory.free_bytes, least, enough)
    whole = memory.total_bytes / 2**30
    return [
        Finding(
            "memory",
            level,
            f"available of {whole:.3g} GiB of {memory.limited_by}",
            measured=memory.free_bytes,
            limit=limit,
            unit="bytes",
            way_out="end processes that use it (ps --sort=-rss), or raise the limit",
        )
    ]


def judge_cgroups(found: list[CgroupLevel], cpus: int, limits: Limits) -> list[Finding]:
    """Judge the limits of processes and processor time."""
    findings = []
    for level in found:
        if level.pids_used is not None and level.pids_limit:
            share = level.pids_used / level.pids_limit
            if share >= limits.cgroup_warn_share:
                findings.append(
                    Finding(
                        "cgroup",
                        FAIL if share >= 1 else WARN,
                        "processes and threads are at the limit of the cgroup",
                        level.folder,
                        level.pids_used,
                        level.pids_limit,
                        way_out="raise pids.max (docker --pids-limit, TasksMax of systemd)",
                    )
                )
        if level.quota_cpus is not None and level.quota_cpus < 1 <= cpus:
            findings.append(
                Finding(
                    "cgroup",
                    WARN,
                    "less than one processor for all ranks",
                    level.folder,
                    level.quota_cpus,
                    1,
                    "CPUs",
                    "raise cpu.max (docker --cpus, CPUQuota of systemd)",
                )
            )
        if level.periods and level.throttled / level.periods > limits.throttled_warn_share:
            findings.append(
                Finding(
                    "cgroup",
                    WARN,
                    "periods in which the processor limit stopped processes",
                    level.folder,
                    100 * level.throttled / level.periods,
                    100 * limits.throttled_warn_share,
                    "%",
                    "raise cpu.max, or use fewer ranks and loader processes",
                )
            )
    return findings or [Finding("cgroup", OK if found else UNKNOWN, _cgroup_text(found))]


def _cgroup_text(found: list[CgroupLevel]) -> str:
    return "no limit is near" if found else "the cgroup's files are not visible"


def judge_files(facts: FileFacts, processes: list[DescriptorFact], limits: Limits) -> list[Finding]:
    """Judge descriptors and lockable memory. Args: processes: of the job, if there is one."""
    findings = [
        Finding(
            "files",
            FAIL if each.used >= each.limit else WARN,
            "descriptors of the process are at its limit",
            f"{one_line(each.name)[:32]} ({each.pid})",
            each.used,
            each.limit,
            way_out="close unused descriptors, use fewer loader workers, or raise ulimit -n",
        )
        for each in sorted(processes, key=lambda each: each.limit - each.used)[:_MAX_PROCESSES_REPORTED]
        if each.used >= limits.files_warn_share * each.limit
    ]
    if facts.soft_limit >= 0:  # RLIM_INFINITY is -1
        level, limit = if_below(facts.soft_limit, limits.files_fail_soft, limits.files_warn_soft)
        findings.append(
            Finding(
                "files",
                level,
                "descriptors that a process may have",
                measured=facts.soft_limit,
                limit=limit,
                way_out="ulimit -n 65536, or LimitNOFILE of systemd",
            )
        )
    if facts.used is not None and facts.most and facts.used / facts.most >= limits.files_warn_share:
        findings.append(
            Finding(
                "files",
                FAIL if facts.used >= facts.most else WARN,
                "open files of the whole node are at their limit",
                measured=facts.used,
                limit=facts.most,
                way_out="find the processes (lsof), or raise sysctl fs.file-max",
            )
        )
    if facts.has_rdma and facts.locked_bytes is not None and facts.locked_bytes < _LOCKED_ENOUGH_BYTES:
        findings.append(
            Finding(
                "files",
                WARN,
                "little memory may be locked, and RDMA locks its buffers",
                measured=facts.locked_bytes,
                limit=_LOCKED_ENOUGH_BYTES,
                unit="bytes",
                way_out="ulimit -l unlimited (docker --ulimit memlock=-1, LimitMEMLOCK of systemd)",
            )
        )
    return findings or [Finding("files", OK, "no limit")]


def judge_clock(clock: ClockState | None, has_timesync: bool, limits: Limits) -> list[Finding]:
    """Judge the clock. Args: has_timesync: systemd-timesyncd reports that it has set it."""
    way_out = "start chronyd, ntpd or systemd-timesyncd, and check its state (chronyc tracking, timedatectl)"
    if clock is None:
        what = "systemd-timesyncd has set it" if has_timesync else "the kernel's clock state is not readable here"
        return [Finding("clock", OK if has_timesync else UNKNOWN, what)]
    offset_s = abs(clock.offset_s)
    if clock.is_synchronised and offset_s >= limits.clock_fail_s:
        return [Finding("clock", FAIL, "it is wrong by", "", offset_s, limits.clock_fail_s, "s", way_out)]
    if not clock.is_synchronised and not has_timesync:
        what = "not synchronised, as far as the kernel knows"
        return [Finding("clock", WARN, what, way_out=way_out)]
    error_s = max(offset_s, clock.error_s) if clock.is_synchronised else offset_s
    level = WARN if error_s > limits.clock_warn_s else OK
    what = "synchronised, to within" if level == OK else "synchronised, but it may be wrong by"
    return [Finding("clock", level, what, "", error_s, limits.clock_warn_s, "s", way_out)]


def judge_space(path: str, room: FileSystemSpace, is_written: bool, limits: Limits) -> list[Finding]:
    """Judge space and inodes. Args: is_written: the path is also written."""
    findings = []
    if is_written and room.is_read_only:
        findings.append(
            Finding(
                "space",
                FAIL,
                "the file system is read-only",
                path,
                way_out="remount it, or name another directory",
            )
        )
    if not is_written:
        return findings or [Finding("space", OK, "only read, so it needs no space", path)]
    if room.total_bytes:
        enough = max(limits.space_fail_bytes, limits.space_warn_share * room.total_bytes)
        level, limit = if_below(room.free_bytes, limits.space_fail_bytes, enough)
        way_out = "delete unused files, or name another directory"
        findings.append(Finding("space", level, "free", path, room.free_bytes, limit, "bytes", way_out))
    if room.inodes:
        share = room.free_inodes / room.inodes
        level, limit = if_below(share, limits.inodes_fail_share, limits.inodes_warn_share)
        way_out = "delete small files (du --inodes), or recreate the file system with more inodes"
        findings.append(Finding("space", level, "free inodes", path, 100 * share, 100 * limit, "%", way_out))
    return findings or [Finding("space", OK, "the file system counts neither blocks nor inodes", path)]


def judge_shared_memory(room: FileSystemSpace, limits: Limits) -> list[Finding]:
    """Judge the tmpfs through which data loaders pass batches."""
    least = limits.shared_memory_warn_bytes
    level = WARN if room.total_bytes < least else OK
    way_out = "docker --shm-size 16g, an emptyDir of medium Memory in Kubernetes, or fewer loader processes"
    return [Finding("shared-memory", level, "size", "/dev/shm", room.total_bytes, least, "bytes", way_out)]  # noqa: S108


def judge_disks(facts: list[DiskFact]) -> list[Finding]:
    """Judge states and error counts of disks."""
    findings = []
    for where, kind, value in facts:
        if kind == "state" and value not in _HEALTHY_STATES:
            level = WARN if value in _PASSING else FAIL
            what, way_out = f"the disk or its controller is {value}", "have it inspected (dmesg, smartctl -a)"
            findings.append(Finding("disks", level, what, where, way_out=way_out))
        elif kind == "errors" and value != "0":
            what, way_out = "the file system has counted errors", "unmount it and have it checked (fsck)"
            findings.append(Finding("disks", FAIL, what, where, float(value), 0, "errors", way_out))
        elif kind == "degraded" and value != "0":
            what, way_out = "the array misses disks", "replace them (mdadm --detail)"
            findings.append(Finding("disks", WARN, what, where, float(value), 0, "disks", way_out))
    if findings:
        return findings
    if not facts:
        return [
            Finding(
                "disks", UNKNOWN, "no disk reports its state here", way_out="nothing to do in a container or VM"
            )
        ]
    places = counted(len({fact.where for fact in facts}), "disk or file system", "disks and file systems")
    return [Finding("disks", OK, f"nothing wrong with {places}")]


def judge_read_only(mounts: list[Mount]) -> list[Finding]:
    """Find mounts for writing whose file system is read-only: the kernel does so after errors."""
    return [
        Finding(
            "mounts",
            FAIL,
            f"{mount.kind} is read-only although it was mounted for writing: the kernel does so after errors",
            mount.point,
            way_out="see dmesg, unmount it and have it checked",
        )
        for mount in mounts
        if mount.kind in ("ext2", "ext3", "ext4", "f2fs", "btrfs")
        and mount.is_read_only_below
        and not mount.is_read_only
    ]


def judge_lookup(address: str, seconds: float, limits: Limits) -> list[Finding]:
    """Judge the lookup of an address's name: ranks that join torch's store wait for theirs one after the other."""
    level = WARN if seconds > limits.names_warn_s else OK
    what = "the name server answered after"
    way_out = (
        "correct /etc/resolv.conf, or run a caching name server on the node: torch's store asks for each rank"
    )
    return [Finding("names", level, what, address, seconds, limits.names_warn_s, "s", way_out)]


def judge_answer(point: str, kind: str, seconds: float, limits: Limits) -> list[Finding]:
    level = WARN if seconds > limits.mount_warn_s else OK
    way_out = "check the file server and the network to it"
    return [Finding("mounts", level, f"{kind} answered after", point, seconds, limits.mount_warn_s, "s", way_out)]
