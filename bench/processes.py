"""Runs programs for a measurement: wall time, and the CPU time of everything that they start.

This process becomes a subreaper, so that what a launcher leaves behind comes to it: its CPU time is counted, and
what does not end is an error. Output goes to a file; it is shown when a run is not as expected.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench.record import BenchError

PR_SET_CHILD_SUBREAPER = 36
LEAVES_WITHIN_S = 10.0


class Ended(NamedTuple):
    """A program and all that it started have ended."""

    status: int  # exit status, or minus the number of the signal
    began_ns: int  # monotonic, before it was started
    wall_s: float  # until the program itself ended
    cpu_s: float  # of it and of all its descendants
    output: str


class Running:
    """A program that was started."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], output: str) -> None:
        self.argv = list(argv)
        self.output = output
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, output, flags | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        self.began_ns = time.monotonic_ns()
        self.pid = os.posix_spawn(self.argv[0], self.argv, environ, file_actions=files)

    def text(self) -> str:
        """What it has written so far."""
        with open(self.output, encoding="utf-8", errors="replace") as file:
            return file.read()

    def wait(self, deadline_s: float) -> tuple[int, float, float]:
        """Exit status, wall and CPU seconds; past the deadline it is killed and the bench ends."""
        fd = os.pidfd_open(self.pid)
        try:
            ended, _, _ = select.select([fd], [], [], deadline_s)
        finally:
            os.close(fd)
        if not ended:
            os.kill(self.pid, signal.SIGKILL)
        _, status, used = os.wait4(self.pid, 0)
        wall_s = (time.monotonic_ns() - self.began_ns) / 1e9
        if not ended:
            raise BenchError(f"still running after {deadline_s} s: {' '.join(self.argv)}\n{self.text()[-4000:]}")
        return os.waitstatus_to_exitcode(status), wall_s, used.ru_utime + used.ru_stime


def become_subreaper() -> None:
    """Makes orphans of our children our children."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def reap_orphans(deadline_s: float = LEAVES_WITHIN_S) -> float:
    """Waits for all that the programs left behind; their CPU seconds."""
    cpu_s = 0.0
    end_s = time.monotonic() + deadline_s
    while True:
        try:
            pid, _, used = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return cpu_s
        if pid:
            cpu_s += used.ru_utime + used.ru_stime
        elif time.monotonic() > end_s:
            raise BenchError("processes of a run that has ended are still there")
        else:
            time.sleep(0.002)


def run_all(
    commands: Sequence[Sequence[str]], environ: Mapping[str, str], directory: str, deadline_s: float
) -> list[Ended]:
    """Starts programs at once and waits for all; the last one's CPU time includes what they all left behind."""
    running = [
        Running(argv, environ, os.path.join(directory, f"output{number}")) for number, argv in enumerate(commands)
    ]
    found = [(program, *program.wait(deadline_s)) for program in running]
    left_cpu_s = reap_orphans()
    ended = [
        Ended(status, program.began_ns, wall_s, cpu_s, program.text()) for program, status, wall_s, cpu_s in found
    ]
    ended[-1] = ended[-1]._replace(cpu_s=ended[-1].cpu_s + left_cpu_s)
    for program, end in zip(running, ended, strict=True):
        if end.status != 0:
            raise BenchError(
                f"exit status {end.status} instead of 0: {' '.join(program.argv)}\n{end.output[-4000:]}"
            )
    return ended
