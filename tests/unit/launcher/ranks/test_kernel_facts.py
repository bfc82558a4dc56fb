"""What the kernel's log and counters say of a process: from files like its own, and from a real kill."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.ranks.kernel_facts import KernelFacts, find_counters, has_device_fault
from tests.support import lacking

KILLED = "3,1234,5678,-;Out of memory: Killed process {pid} (python3) total-vm:1kB, anon-rss:1kB\n"
SEGFAULT = "6,1235,5679,-;python3[{pid}]: segfault at 0 ip 00007f sp 00007f error 4 in libx.so\n"
XID = "3,1236,5680,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"


class Kernel:
    """Its log in a file, and a counter."""

    def __init__(self, folder: Path) -> None:
        self.log, self.counter = folder / "kmsg", folder / "memory.events"
        self.log.write_text(KILLED.format(pid=7))
        self.set(3)

    def set(self, count: int) -> None:
        self.counter.write_text(f"low 0\noom 9\noom_kill {count}\n")

    def say(self, line: str, pid: int = 0) -> None:
        with self.log.open("a") as file:
            file.write(line.format(pid=pid))

    def facts(self, *, log: bool = True, counter: bool = True) -> KernelFacts:
        return KernelFacts(str(self.log) if log else "/dev/null/none", (str(self.counter),) if counter else ())


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr("launcher.ranks.kernel_facts._is_first_pid_namespace", lambda: True)
    return Kernel(tmp_path)


def test_what_was_before_is_no_news(kernel: Kernel) -> None:
    facts = kernel.facts()
    assert facts.of(7) == ("no", ())
    facts.close()


def test_a_process_that_was_killed_for_want_of_memory(kernel: Kernel) -> None:
    facts = kernel.facts()
    kernel.say(KILLED, 8)
    word = facts.of(8)
    assert word.oom == "yes"
    assert "Killed process 8" in word.lines[0]
    assert facts.of(9).oom == "no", "another one was"
    facts.begin()
    assert facts.of(8).oom == "no", "that was the attempt before"
    facts.close()


def test_a_counter_alone_says_maybe(kernel: Kernel) -> None:
    facts = kernel.facts(log=False)
    assert facts.of(8) == ("", ()), "a limit above ours counts elsewhere"
    kernel.set(4)
    assert facts.of(8) == ("maybe", ())


def test_in_a_container_the_logs_numbers_name_nobody(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.ranks.kernel_facts._is_first_pid_namespace", lambda: False)
    facts = kernel.facts()
    assert facts.of(8).oom == ""
    kernel.say(KILLED, 8)
    assert facts.of(8) == ("maybe", ())
    facts.close()


def test_lines_about_the_process_and_about_accelerators(kernel: Kernel) -> None:
    facts = kernel.facts()
    kernel.say(SEGFAULT, 8)
    kernel.say(SEGFAULT, 9)
    kernel.say(XID)
    lines = facts.of(8).lines
    assert [line.split(" ")[0] for line in lines] == ["python3[8]:", "NVRM:"]
    facts.close()


def test_a_flood_is_bounded(kernel: Kernel) -> None:
    facts = kernel.facts()
    kernel.say(XID * 5000)
    assert len(facts.of(8).lines) == 4
    facts.close()


def test_nothing_can_be_read(tmp_path: Path) -> None:
    facts = KernelFacts(str(tmp_path / "none"), (str(tmp_path / "none"),))
    assert facts.of(1) == ("", ())
    facts.begin()
    facts.close()


@pytest.mark.parametrize(
    ("own", "made", "found"),
    [
        ("0::/a/b\n", "a/memory.events", "a/memory.events"),
        ("0::/\n", "memory.events", "memory.events"),
        ("0::/host/only\n", "memory.events", "memory.events"),
        ("4:cpu,memory:/x\n0::/\n", "memory/x/memory.oom_control", "memory/x/memory.oom_control"),
        ("0::/../out\n", "memory.events", ""),
        ("nonsense\n", "memory.events", ""),
    ],
)
def test_where_the_counters_are(tmp_path: Path, own: str, made: str, found: str) -> None:
    path = tmp_path / "cg" / made
    path.parent.mkdir(parents=True)
    path.write_text("oom_kill 0\n")
    (tmp_path / "own").write_text(own)
    counters = find_counters(str(tmp_path / "cg"), str(tmp_path / "own"))
    assert counters == ((str(tmp_path / "cg" / found),) if found else ())


def _memory_cgroup() -> Path:
    """A folder in which cgroups with a limit can be made; v1, or v2 with the controller."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    if (v1 / "memory.limit_in_bytes").exists():
        return v1
    control = v2 / "cgroup.subtree_control"
    if not control.exists() or "memory" not in control.read_text().split():
        lacking("no memory controller of cgroups can be used here")
    return v2


@pytest.mark.system
def test_a_real_kill(tmp_path: Path) -> None:
    if os.geteuid():
        lacking("makes a memory cgroup, which takes root")
    if not os.access("/dev/kmsg", os.R_OK) or os.readlink("/proc/self/ns/pid") != "pid:[4026531836]":
        pytest.skip("the kernel's log, or its process numbers, are hidden here")
    group = _memory_cgroup() / f"bootseer-test-{os.getpid()}"
    group.mkdir()
    try:
        limit = group / ("memory.max" if (group / "memory.max").exists() else "memory.limit_in_bytes")
        limit.write_text(str(96 << 20))
        facts = KernelFacts()
        code = f"open({str(group / 'cgroup.procs')!r}, 'w').write('0'); x = bytearray(400 << 20)"
        process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
        assert process.wait(60) == -9
        word = facts.of(process.pid)
        assert word.oom == "yes"
        assert str(process.pid) in word.lines[0]
        facts.close()
    finally:
        group.rmdir()


def test_a_fault_of_a_gpu_is_kept_among_many_errors_of_programs(kernel: Kernel) -> None:
    facts = kernel.facts()
    for _ in range(9):
        kernel.say("3,1237,5681,-;NVRM: Xid (PCI:0000:3b:00): 43, pid=9, name=python3, channel 0x1\n")
    kernel.say(XID)
    word = facts.of(8)
    assert "79" in word.lines[0] and has_device_fault(word.lines)
    assert not has_device_fault(word.lines[1:])
    facts.close()
