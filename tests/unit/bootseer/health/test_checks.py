"""Each check made to fail, by files and a library behind the same door as the real ones; a node that is well."""

from __future__ import annotations

import errno
import os
import re
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.errors import UsageError
from bootseer.health import checks, kernel_lines, nvml
from bootseer.health import host_interface as host_interface
from bootseer.health.checks import CHECKS, Request, choose, make_tasks
from bootseer.health.finding import FAIL, HUNG, OK, UNKNOWN, WARN, Finding
from bootseer.health.host_interface import ClockState, FileSystemSpace, HostInterface
from bootseer.health.limits import Limits
from bootseer.health.runner import run_tasks
from tests.unit.bootseer.health.machines import (
    GOOD_CLOCK,
    HEALTHY,
    ROOMY,
    WELL,
    MadeHost,
    compile_nvml,
    restore_tree,
    write_tree,
    write_values,
)

NOW = "900000000000000000"  # of a record of the log: later than any look


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("node")
    write_tree(root, HEALTHY)
    return root


@pytest.fixture
def door(tree: Path) -> Iterator[MadeHost]:
    yield MadeHost(os.fspath(tree))
    restore_tree(tree, HEALTHY)


def run(door: MadeHost, *names: str, **request: object) -> list[Finding]:
    tasks = make_tasks(door, Request(**request), choose(names))  # type: ignore[arg-type]
    found = [finding for task in tasks for finding in task.run()]
    assert {finding.check for finding in found} <= {task.check for task in tasks}
    return found


def looked_at(path: str = "/data", is_written: bool = True) -> dict[str, object]:
    return {"paths": (checks.Path(path, is_written, False),)}


def test_a_node_that_is_well(door: MadeHost) -> None:
    found = run(door, *CHECKS, **looked_at())
    assert [str(finding) for finding in found if finding.level != OK] == []
    assert {finding.check for finding in found} == set(CHECKS) - {"storage"}


# One file changed: the check, what it says, how bad it is, where.
FILES = [
    ("memory", "proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable: 1000000 kB\n", WARN, "available", ""),
    ("memory", "proc/meminfo", "MemTotal: 16000000 kB\nMemAvailable: 200000 kB\n", FAIL, "available", ""),
    ("memory", "proc/meminfo", "", UNKNOWN, "cannot be read", ""),
    ("cgroup", "sys/fs/cgroup/job/pids.max", "110", WARN, "processes and threads", "/sys/fs/cgroup/job"),
    ("cgroup", "sys/fs/cgroup/job/pids.max", "100", FAIL, "processes and threads", "/sys/fs/cgroup/job"),
    ("cgroup", "sys/fs/cgroup/job/cpu.max", "50000 100000", WARN, "less than one processor", "/sys/fs/cgroup/job"),
    ("cgroup", "sys/fs/cgroup/job/cpu.stat", "nr_periods 9\nnr_throttled 5", WARN, "stop", "/sys/fs/cgroup/job"),
    ("files", "proc/sys/fs/file-nr", "95000\t0\t100000", WARN, "open files", ""),
    ("files", "proc/sys/fs/file-nr", "100000\t0\t100000", FAIL, "open files", ""),
    ("disks", "sys/block/sda/device/state", "offline", FAIL, "is offline", "sda"),
    ("disks", "sys/class/nvme/nvme0/state", "dead", FAIL, "is dead", "nvme0"),
    ("disks", "sys/class/nvme/nvme0/state", "resetting", WARN, "is resetting", "nvme0"),
    ("disks", "sys/fs/ext4/sda1/errors_count", "3", FAIL, "counted errors", "sda1"),
    ("disks", "sys/fs/btrfs/uuid/devinfo/1/error_stats", "write_errs 2\nread_errs 1", FAIL, "counted", "uuid:1"),
    ("disks", "sys/block/md0/md/degraded", "1", WARN, "misses disks", "md0"),
    ("mounts", "proc/self/mountinfo", "20 1 8:1 / / rw,relatime - ext4 /dev/sda1 ro\n", FAIL, "read-only", "/"),
    ("network", "sys/class/net/eth0/carrier", "0", FAIL, "no link", "eth0"),
    ("network", "sys/class/net/eth0/flags", "0x1002", FAIL, "turned off", "eth0"),
    ("network", "sys/class/net/eth0/duplex", "half", WARN, "half duplex", "eth0"),
    ("network", "sys/class/infiniband/mlx5_1/ports/1/state", "1: DOWN", WARN, "no link (DOWN", "mlx5_1/1"),
    ("network", "sys/class/infiniband/mlx5_1/ports/1/rate", "100 Gb/sec (1X NDR)", WARN, "slower", "mlx5_1/1"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "name", "text", "level", "words", "where"), FILES)
def test_a_file_that_says_otherwise(
    door: MadeHost, check: str, name: str, text: str, level: str, words: str, where: str
) -> None:
    write_tree(Path(door.root), {name: text})
    (found,) = [finding for finding in run(door, check) if finding.level != OK]
    assert (found.level, found.where) == (level, where) and words in found.what
    assert found.way_out or level == UNKNOWN
    assert [other.level for other in run(door, *[each for each in CHECKS if each != check])].count(OK) > 8


# A line of the kernel's log.
LINES = [
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", FAIL, "Xid 79", "0000:3b:00"),
    ("NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception", WARN, "Xid 13", "0000:3b:00"),
    ("NVRM: Xid (PCI:0000:3b:00): 95, Uncontained", FAIL, "uncontained ECC", "0000:3b:00"),
    ("NVRM: GPU at PCI:0000:3b:00.0 has fallen off the bus.", FAIL, "fallen off", "0000:3b:00.0"),
    ("Out of memory: Killed process 812 (python) total-vm:1kB", WARN, "lack of memory", ""),
    ("mce: [Hardware Error]: Machine check events logged", WARN, "hardware errors", ""),
    ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", FAIL, "not corrected", ""),
    ("blk_update_request: I/O error, dev sdb, sector 2048 op 0x0:(READ)", FAIL, "I/O errors", "sdb"),
    ("critical medium error, dev sdc, sector 1", FAIL, "I/O errors", "sdc"),
    ("Buffer I/O error on dev dm-0, logical block 1, async page read", FAIL, "I/O errors", "dm-0"),
    ("nvme nvme1: controller is down; will reset: CSTS=0xffffffff", FAIL, "NVMe", "nvme1"),
    ("EXT4-fs error (device sda1): ext4_find_entry:1455: inode #2", FAIL, "ext4", "sda1"),
    ("XFS (sdb1): Metadata corruption detected at xfs_agf", FAIL, "XFS", "sdb1"),
    ("XFS (sdb1): metadata I/O error in xfs_trans_read_buf_map", FAIL, "XFS", "sdb1"),
    ("mlx5_core 0000:3b:00.0 ens1f0: Link down", WARN, "link went down", "ens1f0"),
    ("igb 0000:01:00.0 eth0: igb: eth0 NIC Link is Down", WARN, "link went down", "eth0"),
    ("INFO: task python:4711 blocked for more than 120 seconds.", WARN, "hung", "python"),
    ("nfs: server files not responding, still trying", WARN, "file server", "files"),
]


@pytest.mark.parametrize(("line", "level", "words", "where"), LINES)
def test_a_line_of_the_kernel(door: MadeHost, line: str, level: str, words: str, where: str) -> None:
    write_tree(Path(door.root), {"dev/kmsg": f"6,1,{NOW},-;hello\n4,2,{NOW},-;{line}\n4,3,{NOW},-;{line}\n"})
    (found,) = run(door, "kernel-log")
    assert (found.level, found.where, found.measured) == (level, where, 2) and words in found.what, found


def test_every_rule_over_the_log_has_a_line_here() -> None:
    rules = (*(rule.pattern for rule in kernel_lines._RULES), kernel_lines._XID, kernel_lines._LINK_DOWN)
    assert [rule.pattern for rule in rules if not any(rule.search(line) for line, *_ in LINES)] == []


@pytest.mark.parametrize("number", sorted(kernel_lines._FATAL_XIDS))
def test_every_fatal_xid(door: MadeHost, number: int) -> None:
    write_tree(Path(door.root), {"dev/kmsg": f"4,2,{NOW},-;NVRM: Xid (PCI:0000:3b:00): {number}, pid=1, x\n"})
    (found,) = run(door, "kernel-log")
    assert found.level == FAIL and found.what.startswith(f"Xid {number}, {kernel_lines._FATAL_XIDS[number]}")


HARMLESS = [
    "IPv6: ADDRCONF(NETDEV_UP): eth0: link is not ready",
    "EXT4-fs (sda1): mounted filesystem with ordered data mode",
    "XFS (sdb1): Mounting V5 Filesystem",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54",
    "EDAC MC: Ver: 3.0.0",
    "mce: CPU0: Thermal monitoring enabled (TM1)",
]


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line(door: MadeHost, line: str) -> None:
    write_tree(Path(door.root), {"dev/kmsg": f"6,1,{NOW},-;{line}\n"})
    assert [found.level for found in run(door, "kernel-log")] == [OK]


def test_old_lines_are_no_news(door: MadeHost) -> None:
    write_tree(Path(door.root), {"dev/kmsg": f"4,2,0,-;{LINES[0][0]}\n"})
    assert [found.level for found in run(door, "kernel-log", log_hours=1e-9)] == [OK]


def test_a_link_that_is_up_again(door: MadeHost) -> None:
    text = "".join(
        f"6,1,{NOW},-;igb 0000:01:00.0: eth0: NIC Link is {word}\n" for word in ("Down", "Up", "Down", "Up")
    )
    write_tree(Path(door.root), {"dev/kmsg": text})
    (found,) = run(door, "kernel-log")
    assert (found.what, found.measured) == ("its link went down and came up again", 2)
    write_tree(Path(door.root), {"dev/kmsg": f"{text}6,1,{NOW},-;igb 0000:01:00.0: eth0: NIC Link is Down\n"})
    (found,) = run(door, "kernel-log")
    assert (found.what, found.measured) == ("its link went down", 3)


def test_a_log_longer_than_one_read(door: MadeHost) -> None:
    write_tree(Path(door.root), {"dev/kmsg": f"4,9,{NOW},-;{LINES[0][0]}\n" * 500})
    assert [(found.level, found.measured) for found in run(door, "kernel-log")] == [(FAIL, 500)]


def test_a_log_that_may_not_be_read(door: MadeHost) -> None:
    os.unlink(door.at("dev/kmsg"))
    (found,) = run(door, "kernel-log")
    assert found.level == UNKNOWN and "root" in found.way_out


# ---- cgroups -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("used", "level"), [(930 << 20, WARN), (1000 << 20, FAIL), (100 << 20, OK)])
def test_memory_of_the_cgroup(door: MadeHost, used: int, level: str) -> None:
    """16 GB of the machine are free, and 1 GiB is all that the cgroup may have."""
    job = "sys/fs/cgroup/job"
    write_tree(Path(door.root), {f"{job}/memory.max": str(1 << 30), f"{job}/memory.current": str(used)})
    write_tree(Path(door.root), {f"{job}/memory.stat": "inactive_file 0"})
    (found,) = run(door, "memory", limits=Limits(memory_fail_bytes=50 << 20))
    assert (found.level, found.measured) == (level, (1 << 30) - used) and found.what.endswith("/job")


def test_cgroups_of_the_first_version(door: MadeHost) -> None:
    write_tree(
        Path(door.root),
        {
            "proc/self/cgroup": "5:cpu,cpuacct:/job\n4:pids:/job\n3:memory:/job\n2:freezer:/\n",
            "sys/fs/cgroup/pids/job/pids.current": "99",
            "sys/fs/cgroup/pids/job/pids.max": "100",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "20000",
            "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": str(1 << 30),
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": str(1 << 30),
        },
    )
    found = {each.where: (each.level, each.measured) for each in run(door, "cgroup")}
    assert found == {
        "/sys/fs/cgroup/pids/job": (WARN, 99),
        "/sys/fs/cgroup/cpu,cpuacct/job": (WARN, 0.2),
    }
    assert [each.level for each in run(door, "memory")] == [FAIL]
    write_tree(Path(door.root), {"proc/self/cgroup": ""})
    assert [each.level for each in run(door, "cgroup")] == [UNKNOWN]


# ---- what is no file -----------------------------------------------------------------------------------------


def test_few_descriptors(door: MadeHost) -> None:
    door.soft_limit = 1024
    assert [(found.level, found.measured) for found in run(door, "files")] == [(WARN, 1024)]
    door.soft_limit = 64
    assert [found.level for found in run(door, "files")] == [FAIL]


def test_little_locked_memory_counts_with_rdma_only(door: MadeHost) -> None:
    door.locked = 64 << 10
    assert [found.level for found in run(door, "files")] == [OK, WARN]
    shutil.rmtree(door.at("sys/class/infiniband"))
    assert [found.level for found in run(door, "files")] == [OK]


@pytest.mark.parametrize(
    ("state", "level"),
    [
        (GOOD_CLOCK, OK),
        (ClockState(True, 2.0, 0.01), FAIL),
        (ClockState(True, -2.0, 0.01), FAIL),
        (ClockState(True, 0.0, 0.5), WARN),
        (ClockState(False, 0.0, 16.0), WARN),
        (None, UNKNOWN),
    ],
)
def test_clocks(door: MadeHost, state: ClockState | None, level: str) -> None:
    os.unlink(door.at("run/systemd/timesync/synchronized"))
    door.clock_state = state
    assert [found.level for found in run(door, "clock")] == [level]


@pytest.mark.parametrize(("lookup_s", "level"), [(0.0, OK), (0.1, OK), (0.2, WARN), (3.0, WARN)])
def test_a_slow_name_server(door: MadeHost, lookup_s: float, level: str) -> None:
    door.lookup_s = lookup_s
    (found,) = run(door, "names")
    assert (found.level, found.where, found.measured) == (level, "10.1.2.3", lookup_s)


@pytest.mark.parametrize("address", ["10.1.2.3", None])
def test_the_lookup_is_the_one_of_torchs_store(monkeypatch: pytest.MonkeyPatch, address: str | None) -> None:
    asked: list[object] = []

    class Probe(socket.socket):
        def connect(self, _: object) -> None:
            if address is None:
                raise OSError(errno.ENETUNREACH, "Network is unreachable")

        def getsockname(self) -> tuple[str | None, int]:
            return address, 1

    def refuse(*words: object) -> object:
        asked.append(words)
        raise socket.gaierror(socket.EAI_NONAME, "no such name")

    monkeypatch.setattr(host_interface.socket, "socket", Probe)
    monkeypatch.setattr(host_interface.socket, "getnameinfo", refuse)
    where, lookup_s = HostInterface().name_lookup()
    assert where == (address or "127.0.0.1") and 0 < lookup_s < host_interface.MAX_LOOKUP_S
    assert asked == [((f"::ffff:{where}", 0, 0, 0), 0)]


def test_a_name_server_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(host_interface, "MAX_LOOKUP_S", 0.02)
    monkeypatch.setattr(host_interface.socket, "getnameinfo", lambda *_: over.wait(20))
    try:
        assert HostInterface().name_lookup()[1] >= 0.02
    finally:
        over.set()


@pytest.mark.parametrize(
    ("room", "level", "words"),
    [
        (ROOMY._replace(free_bytes=10**10), WARN, "free"),
        (ROOMY._replace(free_bytes=10**7), FAIL, "free"),
        (ROOMY._replace(free_inodes=10**4), WARN, "free inodes"),
        (ROOMY._replace(free_inodes=10), FAIL, "free inodes"),
        (ROOMY._replace(is_read_only=True), FAIL, "the file system is read-only"),
        (OSError(errno.ESTALE, "Stale file handle"), FAIL, "Stale file handle"),
    ],
)
def test_space(door: MadeHost, room: FileSystemSpace | OSError, level: str, words: str) -> None:
    door.rooms["/data"] = room
    (found,) = [found for found in run(door, "space", **looked_at()) if found.level != OK]
    assert (found.level, found.what, found.where) == (level, words, "/data") and found.way_out


def test_what_is_only_read_needs_no_space(door: MadeHost) -> None:
    door.rooms["/data"] = ROOMY._replace(free_bytes=0, is_read_only=True)
    assert [found.level for found in run(door, "space", **looked_at(is_written=False))] == [OK]


def test_small_shared_memory(door: MadeHost) -> None:
    door.rooms["/dev/shm"] = ROOMY._replace(total_bytes=64 << 20)
    (found,) = run(door, "shared-memory")
    assert found.level == WARN and "--shm-size" in found.way_out


@pytest.mark.parametrize(
    ("answer", "level"),
    [
        (OSError(errno.ENOTCONN, "Transport endpoint is not connected"), FAIL),
        (PermissionError(errno.EACCES, "no"), OK),
    ],
)
def test_a_mount_that_answers_by_an_error(door: MadeHost, answer: OSError, level: str) -> None:
    door.rooms["/mnt/da ta"] = answer
    (found,) = [found for found in run(door, "mounts") if found.where]
    assert (found.level, found.where) == (level, "/mnt/da ta")


def test_a_mount_that_goes_meanwhile(door: MadeHost) -> None:
    """Of another job, mostly."""
    door.rooms["/mnt/da ta"] = OSError(errno.ENOENT, "No such file or directory")
    tasks = make_tasks(door, Request(), ["mounts"])
    write_tree(Path(door.root), {"proc/self/mountinfo": "20 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n"})
    assert [found.level for task in tasks for found in task.run()] == [OK, OK]


def test_of_very_many_mounts_some_are_asked(door: MadeHost) -> None:
    lines = [f"{number} 1 0:{number} / /mnt/{number} rw - nfs server:/{number} rw\n" for number in range(100)]
    write_tree(Path(door.root), {"proc/self/mountinfo": "".join(lines)})
    found = run(door, "mounts")
    assert len(found) == 1 + checks.MAX_MOUNTS and found[0].what == "only 64 of 100 mounts of servers are checked"


def test_where_no_disk_is_to_be_seen(door: MadeHost) -> None:
    for directory in ("block", "class/nvme", "fs"):
        shutil.rmtree(door.at(f"sys/{directory}"))
    assert [found.level for found in run(door, "disks")] == [UNKNOWN]


def test_a_mount_that_answers_late(door: MadeHost, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter((0.0, 5.0))
    monkeypatch.setattr(door, "now_s", lambda: next(ticks))
    (found,) = [found for found in run(door, "mounts") if found.where]
    assert (found.level, found.measured, found.limit, found.unit) == (WARN, 5.0, 1.0, "s")


def test_what_was_mounted_read_only_is_in_order(door: MadeHost) -> None:
    write_tree(Path(door.root), {"proc/self/mountinfo": "20 1 8:1 / / ro,relatime - ext4 /dev/sda1 ro\n"})
    assert [found.level for found in run(door, "mounts")] == [OK]


def test_a_process_of_the_job_without_descriptors(door: MadeHost) -> None:
    processes = {
        7: ("50", 3, "bootrun"),
        50: ("60 61", 3, "guard"),
        60: ("", 96, "pt_main"),
        61: ("", 100, "pt_main"),
    }
    for pid, (children, used, name) in processes.items():
        files = {f"proc/{pid}/fd/{number}": "" for number in range(used)}
        limits = (
            "Limit Soft Hard Units\nMax open files            100                  4096                 files\n"
        )
        more = {
            f"proc/{pid}/task/{pid}/children": children,
            f"proc/{pid}/limits": limits,
            f"proc/{pid}/comm": name,
        }
        write_tree(Path(door.root), {**files, **more})
    found = [each for each in run(door, "files", ancestor=7) if each.level != OK]
    assert [(each.level, each.where, each.measured, each.limit) for each in found] == [
        (FAIL, "pt_main (61)", 100, 100),
        (WARN, "pt_main (60)", 96, 100),
    ]
    assert [each.level for each in run(door, "files")] == [OK]


# ---- counters ------------------------------------------------------------------------------------------------

PORT = "sys/class/infiniband/mlx5_0/ports/1/counters"
NET = "sys/class/net/eth0"


@pytest.mark.parametrize(
    ("name", "after", "level", "measured"),
    [
        (f"{NET}/statistics/rx_errors", 27, WARN, 10.0),
        (f"{NET}/statistics/rx_errors", 2007, FAIL, 1000.0),
        (f"{NET}/statistics/rx_dropped", 200007, WARN, 100000.0),
        (f"{NET}/carrier_changes", 4, FAIL, None),
        (f"{PORT}/symbol_error", 1003, FAIL, 500.0),
        (f"{PORT}/link_downed", 1, FAIL, None),
        (f"{NET}/statistics/rx_errors", 8, OK, None),
        (f"{NET}/statistics/rx_errors", 0, OK, None),  # it began anew
    ],
)
def test_counters_that_grow(door: MadeHost, name: str, after: int, level: str, measured: float | None) -> None:
    door.while_asleep = lambda: write_tree(Path(door.root), {name: str(after)})
    (found,) = run(door, "network", interval_s=2.0)
    assert (found.level, found.measured) == (level, measured)


def test_the_nic_of_a_container(door: MadeHost) -> None:
    """It is no hardware; but everything goes through it."""
    shutil.rmtree(door.at("sys/class/net/eth0/device"))
    shutil.rmtree(door.at("sys/class/infiniband"))
    assert [found.what for found in run(door, "network")] == ["links are up and without errors: eth0"]
    write_tree(Path(door.root), {"proc/net/route": "Iface\n"})
    assert [found.level for found in run(door, "network")] == [UNKNOWN]


def test_a_nic_that_is_wanted(door: MadeHost) -> None:
    assert [found.level for found in run(door, "network", nics=("eth0", "mlx5_0/1"))] == [OK]
    (found,) = run(door, "network", nics=("ib7",))
    assert (found.level, found.where) == (FAIL, "ib7")
    write_tree(Path(door.root), {"sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN"})
    assert [found.level for found in run(door, "network", nics=("mlx5_1/1",))] == [FAIL]


# ---- accelerators --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return compile_nvml(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def gpus(door: MadeHost, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., MadeHost]:
    """`gpus(ecc=3)`: a node with two GPUs that are well but for that."""
    values = tmp_path / "values"
    monkeypatch.setenv("FAKE_NVML", os.fspath(values))
    door.nvml = library

    def make(**changed: int) -> MadeHost:
        write_values(
            values, {**WELL, **{name.replace("error_", "error:"): value for name, value in changed.items()}}
        )
        return door

    return make


def test_gpus_that_are_well(gpus: Callable[..., MadeHost]) -> None:
    (found,) = run(gpus(), "accelerators", expect_gpus=2)
    assert (found.level, found.what) == (OK, "2 GPUs are healthy")


@pytest.mark.parametrize(
    ("changed", "level", "words", "how_many"),
    [
        ({"ecc": 3}, FAIL, "uncorrected ECC", 2),
        ({"failed": 1}, FAIL, "could not be remapped", 2),
        ({"pending": 1}, WARN, "will be remapped", 2),
        ({"reasons": 0x20}, WARN, "software slows it down", 2),
        ({"reasons": 0x40}, FAIL, "hardware slows it down because of its temperature", 2),
        ({"reasons": 0x80}, FAIL, "power supply", 2),
        ({"reasons": 0x8}, FAIL, "hardware slows it down", 2),
        ({"temperature": 88}, WARN, "hot", 2),
        ({"width": 8}, WARN, "narrow", 2),
        ({"nvlink_down": 2}, FAIL, "NVLinks are up", 1),
        ({"process": 4711}, WARN, "4711, 4712", 2),
        ({"bad": 1, "error_handle": 15}, FAIL, "GPU is lost (15)", 1),
        ({"error_temperature": 15}, FAIL, "GPU is lost (15)", 2),
        ({"bad": 0, "error_handle": 4}, FAIL, "cannot be used", 1),
        ({"error_init": 18}, FAIL, "driver does not work: Something else (18)", 1),
    ],
)
def test_gpus_that_are_not(
    gpus: Callable[..., MadeHost], changed: dict[str, int], level: str, words: str, how_many: int
) -> None:
    found = run(gpus(**changed), "accelerators")
    assert [each.level for each in found] == [level] * how_many
    assert all(words in each.what and each.way_out for each in found), found
    if how_many == 2:
        assert [each.where for each in found] == ["GPU 0 (00000000:10:00.0)", "GPU 1 (00000000:20:00.0)"]


def test_processes_of_the_job_that_asks_may_compute(gpus: Callable[..., MadeHost]) -> None:
    made = gpus(process=4711)
    write_tree(Path(made.root), {"proc/4711/stat": "4711 (a) b) S 50 1", "proc/50/stat": "50 (guard) S 7 1"})
    found = run(made, "accelerators", ancestor=7)
    assert [(each.level, each.what) for each in found] == [(WARN, "processes compute on it: 4712")] * 2
    write_tree(Path(made.root), {"proc/4712/stat": "4712 (b) S 4711 1"})
    assert [each.level for each in run(made, "accelerators", ancestor=7)] == [OK]
    assert [each.level for each in run(made, "accelerators", ancestor=8)] == [WARN] * 2


def test_a_slow_pcie_link_counts_when_the_gpu_works(gpus: Callable[..., MadeHost]) -> None:
    found = run(gpus(reasons=0x4, generation=1), "accelerators")
    assert [(each.level, each.measured, each.limit) for each in found] == [(WARN, 1, 5)] * 2
    assert [each.level for each in run(gpus(reasons=0x1, generation=1), "accelerators")] == [OK]


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_driver_that_hangs(gpus: Callable[..., MadeHost], until: Callable[[int], None]) -> None:
    until(1)
    tasks = make_tasks(gpus(hang=1), Request(), ["accelerators", "memory"])
    found = [each for findings in run_tasks(tasks, 0.5) for each in findings]
    assert [(each.check, each.level) for each in found] == [("accelerators", HUNG), ("memory", OK)]


def test_gpus_that_tell_little(gpus: Callable[..., MadeHost]) -> None:
    names = ("temperature", "reasons", "ecc", "pending", "generation", "width")
    missing = {f"error_{name}": code for name, code in zip(names, (3, 4, 13, 21, 26, 999), strict=True)}
    assert [found.level for found in run(gpus(**missing), "accelerators")] == [OK]


def test_fewer_gpus_than_expected(gpus: Callable[..., MadeHost], tmp_path: Path) -> None:
    (found,) = run(gpus(), "accelerators", expect_gpus=8)
    assert (found.level, found.measured, found.limit, found.unit) == (FAIL, 2, 8, "GPUs")
    assert [found.level for found in run(gpus(), "accelerators", expect_gpus=1)] == [WARN]
    lost = run(gpus(bad=0, error_handle=15), "accelerators", expect_gpus=2)
    assert [found.measured for found in lost if found.unit == "GPUs"] == [1]


def test_no_gpus(door: MadeHost, gpus: Callable[..., MadeHost]) -> None:
    made = gpus(error_init=9)  # the driver is not loaded: the library came with an image
    assert [found.level for found in run(made, "accelerators")] == [OK]
    write_tree(Path(door.root), {"proc/driver/nvidia/version": "NVRM"})
    assert [found.level for found in run(made, "accelerators")] == [FAIL]
    door.nvml = "no-such-library.so"
    assert [found.level for found in run(door, "accelerators", expect_gpus=0)] == [OK]
    (found,) = run(door, "accelerators", expect_gpus=8)
    assert (found.level, found.measured, found.limit) == (FAIL, 0, 8)
    write_tree(Path(door.root), {"dev/kfd": ""})
    assert [found.level for found in run(door, "accelerators")] == [UNKNOWN]


# ---- storage -------------------------------------------------------------------------------------------------


def stored(path: Path, is_written: bool = True) -> dict[str, object]:
    return {"paths": (checks.Path(os.fspath(path), is_written, True),)}


def test_storage_that_is_well_keeps_nothing(door: MadeHost, tmp_path: Path) -> None:
    directory = tmp_path / "data"
    directory.mkdir()
    found = run(door, "storage", **stored(directory))
    assert [(each.level, each.unit) for each in found] == [(OK, "s"), (OK, "bytes")]
    assert os.listdir(directory) == []
    assert [each.level for each in run(door, "storage", **stored(directory, False))] == [OK]
    (directory / "small").write_text("x")
    (directory / "large").write_bytes(bytes(2 << 20))
    assert [each.unit for each in run(door, "storage", **stored(directory, False))] == ["bytes"]
    assert [each.unit for each in run(door, "storage", **stored(directory / "small", False))] == ["s"]


def test_storage_that_is_slow(door: MadeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter((0.0, 3.0, 10.0, 14.0))
    monkeypatch.setattr(door, "now_s", lambda: next(ticks))
    written, read = run(door, "storage", **stored(tmp_path))
    assert (written.level, written.measured) == (WARN, 3.0)
    assert (read.level, read.measured, read.limit) == (WARN, (4 << 20) / 4, 20e6)


def test_storage_that_is_not_there(door: MadeHost, tmp_path: Path) -> None:
    (found,) = run(door, "storage", **stored(tmp_path / "none"))
    assert found.level == FAIL and "No such file" in found.what


def test_storage_that_refuses(door: MadeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    (found,) = run(door, "storage", **stored(tmp_path))
    assert found.level == FAIL and found.what == "writing a file of 4 MiB failed: No space left on device"
    assert [name for name in os.listdir(tmp_path) if name.startswith(".bootseer")] == []


def test_storage_that_knows_no_files_without_names(
    door: MadeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def open_as_nfs(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *mode)

    monkeypatch.setattr(os, "open", open_as_nfs)
    assert [each.level for each in run(door, "storage", **stored(tmp_path))] == [OK, OK]
    assert [name for name in os.listdir(tmp_path) if name.startswith(".bootseer")] == []


def test_storage_that_gives_other_bytes(door: MadeHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "pread", lambda _fd, size, offset: bytes(size) if offset < 4 << 20 else b"")
    (found,) = run(door, "storage", **stored(tmp_path))
    assert found.level == FAIL and "other bytes" in found.what


# ---- names ---------------------------------------------------------------------------------------------------


def test_unknown_names_are_reported() -> None:
    with pytest.raises(UsageError, match="--only 'memroy': unknown check; known are memory, cgroup"):
        choose(["memory", "memroy"])


# ---- the document --------------------------------------------------------------------------------------------


def test_the_document_says_how_each_check_was_made_to_fail() -> None:
    """Each check and each limit is in docs/guide/checks.md, and the tests that it names are there."""
    top = Path(__file__).parents[4]
    text = (top / "docs/guide/checks.md").read_text()
    table = text.partition("## Made to fail")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `([\w-]+)[:\w]*` \|(.*)\|$", table, re.MULTILINE))
    assert set(rows) == {*CHECKS, "pairs", "clock-skew", "own"}
    for check, row in rows.items():
        tests = re.findall(r"`(test_\w+)`", row)
        files = [top / name for name in re.findall(r"`([\w/]+\.py)`", row)] or [Path(__file__)]
        assert tests, check
        for test in tests:
            assert any(f"def {test}(" in file.read_text() for file in files), f"{check}: {test}"
    assert [name for name in Limits._fields if f"`{name}`" not in text] == []


def test_what_devices_do_is_the_least_and_the_most_of_some_looks(gpus: Callable[..., MadeHost]) -> None:
    door = gpus(use=100, use_again=97, use_memory=3, power=123456, process=77)
    slept = []
    found = nvml.sample_use(door.nvml, 2, lambda: slept.append(1))
    assert found == [nvml.DeviceUse(number, 97, 3, 123.456, (77, 78)) for number in range(2)]
    assert slept == [1]


def test_where_a_device_does_not_tell_what_it_does_nothing_is_known(gpus: Callable[..., MadeHost]) -> None:
    assert nvml.sample_use(gpus(power=1).nvml, 3, lambda: None) == []
    assert nvml.sample_use(gpus(use=1, use_memory=1, error_handle=2, bad=1).nvml, 3, lambda: None) == []
    assert nvml.sample_use(gpus(use=1, use_memory=1, count=0).nvml, 3, lambda: None) == []
    with pytest.raises(nvml.NvmlError):
        nvml.sample_use("no-such-library.so", 1, lambda: None)
    with pytest.raises(nvml.NvmlError, match="GPU is lost"):
        nvml.sample_use(gpus(error_use=15).nvml, 1, lambda: None)
