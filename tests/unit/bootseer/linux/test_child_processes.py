"""Processes that no signal ends are left behind in time, and reaped later."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from bootseer.linux import child_processes
from bootseer.linux.child_processes import end_process, reap_left, run_limited, wait_killed


class Kernel:
    """In it some processes wait, where no signal reaches them, until `let_go`."""

    def __init__(self) -> None:
        self.stuck: list[subprocess.Popen[bytes]] = []

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        self.stuck.append(process)

    def let_go(self) -> None:
        """They end; none is reaped here."""
        while self.stuck:
            each = self.stuck.pop()
            os.kill(each.pid, signal.SIGKILL)
            os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernel]:
    kernel = Kernel()

    def kill(process: subprocess.Popen[bytes]) -> None:
        kernel.kill(process)

    monkeypatch.setattr(subprocess.Popen, "kill", kill)
    monkeypatch.setattr(child_processes, "waits_in_kernel", lambda _pid: True)
    monkeypatch.setattr(child_processes, "IN_KERNEL_S", 0.0)
    yield kernel
    kernel.let_go()
    reap_left()


def is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def test_the_status_of_a_killed_process() -> None:
    process = subprocess.Popen(["/bin/sleep", "1000"])
    assert end_process(process) == -9
    assert process.returncode == -9
    assert not is_child(process.pid)


def test_the_status_of_one_that_has_ended() -> None:
    process = subprocess.Popen(["/bin/false"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert end_process(process) == 1


def test_a_process_in_the_kernel_is_left_and_reaped_later(kernel: Kernel) -> None:
    process = subprocess.Popen(["/bin/sleep", "1000"])
    assert end_process(process) is None
    reap_left()
    assert is_child(process.pid)
    kernel.let_go()
    reap_left()
    assert not is_child(process.pid)


def test_one_that_is_only_slow_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_processes, "IN_KERNEL_S", 0.0)
    monkeypatch.setattr(child_processes, "waits_in_kernel", lambda _pid: False)  # as it does while it reads a file
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2)"])
    assert wait_killed(process.pid) == 0
    process.returncode = 0


def test_a_caller_may_have_a_limit(kernel: Kernel) -> None:
    process = subprocess.Popen(["/bin/sleep", "1000"])
    kernel.kill(process)
    assert wait_killed(process.pid, 0.0) is None
    process.returncode = -9
    kernel.let_go()
    reap_left()
    assert not is_child(process.pid)


def test_a_program_has_input_and_output() -> None:
    done = run_limited(["/bin/sh", "-c", "cat; echo $A >&2; pwd; exit 3"], timeout_s=20, data=b"in\n",
                       environ={"A": "b"}, cwd="/")  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (3, b"in\n/\n", b"b\n")


def test_a_program_has_no_input_by_default() -> None:
    assert run_limited(["/bin/cat"], timeout_s=20).stdout == b""


def test_a_program_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_limited(["/bin/sleep", "1000"], timeout_s=0.01)


def test_a_program_in_the_kernel_does_not_block_its_caller(kernel: Kernel) -> None:
    began_s = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        run_limited(["/bin/sleep", "1000"], timeout_s=0.01)
    assert time.monotonic() - began_s < 20
    [process] = kernel.stuck
    kernel.let_go()
    reap_left()
    assert not is_child(process.pid)
