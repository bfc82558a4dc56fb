"""Lines of the kernel's log that matter to a job. Pure.

Sources: NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors), and the messages of Linux itself:
mm/oom_kill.c, kernel/hung_task.c, block/blk-core.c, fs/ext4/super.c, fs/xfs/xfs_message.c, arch/x86 mce and EDAC,
net/core/dev.c and drivers of NICs.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from bootseer.counted import counted
from bootseer.health.finding import FAIL, OK, UNKNOWN, WARN, Finding, one_line

CHECK = "kernel-log"
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)\): (\d+)")

# The device has to be reset or replaced. All other Xids, most of which a program can cause, are warnings.
_FATAL_XIDS = {
    48: "double-bit ECC error",
    62: "internal micro-controller halt",
    64: "row remapping failed",
    74: "NVLink error",
    79: "GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "GSP does not answer",
    120: "GSP error",
    140: "unrecovered ECC error",
    143: "GPU initialisation failed",
}


class _Rule(NamedTuple):
    pattern: re.Pattern[str]  # group 1, if there is one, is the place
    level: str
    what: str
    way_out: str


_RULES = (
    _Rule(
        re.compile(r"NVRM: .*?GPU.*?([0-9a-fA-F]{4,8}:[0-9a-fA-F:.]+).*fallen off the bus"),
        FAIL,
        "an accelerator has fallen off the bus",
        "reboot the node; if it recurs have the device or its slot inspected",
    ),
    _Rule(
        re.compile(
            r"(?:I/O error|Medium Error|critical (?:medium|target|space allocation) error),? .*?dev ([\w-]+)"
        ),
        FAIL,
        "I/O errors of a disk",
        "move its data and have the disk inspected (smartctl -a)",
    ),
    _Rule(
        re.compile(
            r"(nvme\d+)[\w:. ]*: .*(?:controller is down|Removing after probe failure|I/O .* timeout.*reset)"
        ),
        FAIL,
        "an NVMe controller failed",
        "have the disk inspected (nvme smart-log)",
    ),
    _Rule(
        re.compile(r"EXT4-fs error \(device ([\w-]+)\)"),
        FAIL,
        "errors of an ext4 file system",
        "unmount it and run e2fsck",
    ),
    _Rule(
        re.compile(
            r"XFS \(([\w-]+)\): .*(?:[Cc]orruption|(?:metadata|log) I/O error|[Ss]hutting down|Internal error)"
        ),
        FAIL,
        "errors of an XFS file system",
        "unmount it and run xfs_repair",
    ),
    _Rule(
        re.compile(r"Buffer I/O error on dev(?:ice)? ([\w-]+)"),
        FAIL,
        "I/O errors of a disk",
        "move its data and have the disk inspected (smartctl -a)",
    ),
    _Rule(
        re.compile(
            r"(?:Uncorrected|[Uu]ncorrectable|UE) .*(?:memory|error)|Machine check.*(?:fatal|panic)|: 1 UE "
        ),
        FAIL,
        "hardware errors that were not corrected",
        "read the node's event log (ipmitool sel list) and have the node inspected",
    ),
    _Rule(
        re.compile(r"mce: \[Hardware Error\]|\[Hardware Error\]:|EDAC .* \d+ CE "),
        WARN,
        "hardware errors",
        "read them with rasdaemon or mcelog; many of them precede failures",
    ),
    _Rule(
        re.compile(r"Out of memory: |oom-kill:|Memory cgroup out of memory|[Kk]illed process \d+"),
        WARN,
        "processes were killed for lack of memory",
        "see which (dmesg); reduce the memory of the job, or add memory",
    ),
    _Rule(
        re.compile(r"task ([^:]+):\d+ blocked for more than \d+ seconds"),
        WARN,
        "tasks hung in the kernel",
        "inspect their stacks (dmesg): most wait for a disk or a file server",
    ),
    _Rule(
        re.compile(r"nfs: server (\S+) not responding"),
        WARN,
        "a file server did not answer",
        "check the server and the network to it",
    ),
)
# "link is not ready" is logged for every NIC at boot.
_LINK_DOWN = re.compile(r"\b([\w.@-]+):? (?:NIC )?[Ll]ink (?:is )?[Dd]own")
_LINK_UP = re.compile(r"\b([\w.@-]+):? (?:NIC )?[Ll]ink (?:is |becomes )?(?:[Uu]p|ready)")
_MAX_SHOWN = 32


def judge(lines: list[str] | None, hours: float) -> list[Finding]:
    """Return findings from lines of the last `hours`; None: the log is not readable."""
    if lines is None:
        return [
            Finding(
                CHECK,
                UNKNOWN,
                "the kernel's log is not readable",
                way_out="run as root, or set sysctl kernel.dmesg_restrict=0 and make /dev/kmsg readable",
            )
        ]
    counts: dict[tuple[str, str, str, str], int] = {}
    first: dict[tuple[str, str, str, str], str] = {}
    down: dict[str, int] = {}
    for line in lines:
        if found := _LINK_DOWN.search(line):
            down[found[1]] = down.get(found[1], 0) + 1
        if (key := _sort(line)) is not None:
            counts[key] = counts.get(key, 0) + 1
            first.setdefault(key, line)
    findings = [
        Finding(
            CHECK,
            level,
            f"{what}: {one_line(first[level, where, what, way_out])[:200]}",
            where,
            counts[level, where, what, way_out],
            unit="lines",
            way_out=way_out,
        )
        for level, where, what, way_out in counts
    ]
    findings += [_link(name, times, lines) for name, times in down.items()]
    findings.sort(key=lambda found: found.level != FAIL)
    return findings[:_MAX_SHOWN] or [
        Finding(CHECK, OK, f"no message about hardware, memory or file systems in {counted(hours, 'hour')}")
    ]


def _sort(line: str) -> tuple[str, str, str, str] | None:
    """Return level, place, text and fix of a line."""
    if xid := _XID.search(line):
        number = int(xid[2][:6])
        known = _FATAL_XIDS.get(number)
        if known:
            return FAIL, xid[1], f"Xid {number}, {known}", "reset the GPU or reboot; if it recurs replace it"
        return WARN, xid[1], f"Xid {number}", "see NVIDIA's list of Xids: a program may be the cause"
    for rule in _RULES:
        if found := rule.pattern.search(line):
            where = one_line(found[1])[:64] if rule.pattern.groups else ""
            return rule.level, where, rule.what, rule.way_out
    return None


def _link(name: str, times: int, lines: list[str]) -> Finding:
    """Return the finding of a NIC whose link went down; its last line decides whether it is up again."""
    last_up = -1
    last_down = -1
    for number, line in enumerate(lines):
        if (found := _LINK_UP.search(line)) and found[1] == name:
            last_up = number
        if (found := _LINK_DOWN.search(line)) and found[1] == name:
            last_down = number
    what = "its link went down and came up again" if last_up > last_down else "its link went down"
    return Finding(
        CHECK, WARN, what, name, times, unit="times", way_out="check cable, transceiver and switch port"
    )
