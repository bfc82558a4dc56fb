"""`python -m bench pressure`: do ranks ever wait for bootrun when their output is under pressure?

Two ranks make steps of a few milliseconds and print a line each; they note how long each step took, printing
included. Scenarios: undisturbed, bootrun stopped (SIGSTOP), nobody reads the console, the log disk is full, one
rank writes gigabytes to stderr. Figures: median and longest step of each, and bootrun's peak memory. A rank that
had to wait would show a step as long as the disturbance.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bench.record import BenchError, Figures, Target

ROUNDS = 1
MIB = 1 << 20
TARGETS = {
    "pressure.rss_bytes": Target(at_most=100.0 * MIB),
    "pressure.stopped_longest_s": Target(at_most=1.0),
    "pressure.unread_longest_s": Target(at_most=1.0),
    "pressure.disk_full_longest_s": Target(at_most=1.0),
}
RANK = """
import json, os, sys, time
rank, took, end = os.environ["RANK"], [], time.monotonic() + float(os.environ["SECONDS"])
open(os.environ["FOLDER"] + "/began-" + rank, "w").close()
line = "x" * 200
while time.monotonic() < end:
    began = time.perf_counter()
    sum(range(20000))
    print("step", len(took), line)
    took.append(time.perf_counter() - began)
    time.sleep(0.002)
with open(os.environ["FOLDER"] + "/steps-" + rank, "w") as file:
    json.dump(took, file)
"""
FLOOD = """
import os, sys
block = (b"y" * 199 + b"\\n") * 5000
if os.environ["RANK"] == "0":
    left = int(os.environ["FLOOD_BYTES"])
    while left > 0:
        left -= os.write(2, block)
"""


class Job:
    """A bootrun whose ranks make steps."""

    def __init__(self, folder: str, seconds: float, stdout: int, log_dir: str, flood_bytes: int = 0) -> None:
        self.folder = folder
        script = f"{folder}/rank.py"
        with open(script, "w", encoding="utf-8") as file:
            file.write((FLOOD if flood_bytes else "") + RANK)
        environ = {**os.environ, "FOLDER": folder, "SECONDS": str(seconds), "FLOOD_BYTES": str(flood_bytes)}
        argv = [sys.executable, "-m", "launcher", "--standalone", "--nproc-per-node", "2", "--log-dir", log_dir]
        self.process = subprocess.Popen([*argv, "--tee", "3", script], env=environ, stdout=stdout, stderr=stdout)
        self.peak_bytes = 0

    def wait_begun(self) -> None:
        while not all(os.path.exists(f"{self.folder}/began-{rank}") for rank in (0, 1)):
            if self.process.poll() is not None:
                raise BenchError(f"bootrun ended with {self.process.returncode} before its ranks had begun")
            time.sleep(0.01)

    def wait(self, deadline_s: float) -> None:
        """Until bootrun has ended; follows its memory."""
        end_s = time.monotonic() + deadline_s
        while self.process.poll() is None:
            self.peak_bytes = max(self.peak_bytes, _peak_bytes(self.process.pid))
            if time.monotonic() > end_s:
                self.process.kill()
                self.process.wait()
                raise BenchError(f"bootrun did not end within {deadline_s:g} s")
            time.sleep(0.05)
        if self.process.returncode != 0:
            raise BenchError(f"bootrun ended with {self.process.returncode}")

    def steps(self) -> list[float]:
        """Seconds of all steps of both ranks."""
        found: list[float] = []
        for rank in (0, 1):
            with open(f"{self.folder}/steps-{rank}", encoding="utf-8") as file:
                found += json.load(file)
        return found


def _peak_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


@contextmanager
def _reader(stopped: bool) -> Iterator[int]:
    """A pipe as the console: read by `cat`, or by nobody."""
    read_fd, write_fd = os.pipe()
    cat = None if stopped else subprocess.Popen(["cat"], stdin=read_fd, stdout=subprocess.DEVNULL)
    try:
        yield write_fd
    finally:
        os.close(write_fd)
        os.close(read_fd)
        if cat is not None:
            cat.wait()


def undisturbed(directory: str, seconds: float, _flood_bytes: int) -> Job:
    with _reader(stopped=False) as console:
        job = Job(directory, seconds, console, f"{directory}/logs")
        job.wait(seconds + 30)
    return job


def stopped(directory: str, seconds: float, _flood_bytes: int) -> Job:
    """bootrun gets SIGSTOP for most of the job."""
    with _reader(stopped=False) as console:
        job = Job(directory, seconds, console, f"{directory}/logs")
        job.wait_begun()
        job.process.send_signal(signal.SIGSTOP)
        time.sleep(seconds - 1)
        job.process.send_signal(signal.SIGCONT)
        job.wait(seconds + 30)
    return job


def unread(directory: str, seconds: float, _flood_bytes: int) -> Job:
    """Nobody reads the console."""
    with _reader(stopped=True) as console:
        job = Job(directory, seconds, console, f"{directory}/logs")
        job.wait(seconds + 30)
    return job


def disk_full(directory: str, seconds: float, _flood_bytes: int) -> Job:
    """The log dir is a file system of 1 MiB."""
    mount = f"{directory}/small"
    os.mkdir(mount)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", mount], check=True)
    try:
        with _reader(stopped=False) as console:
            job = Job(directory, seconds, console, mount)
            job.wait(seconds + 30)
    finally:
        subprocess.run(["umount", mount], check=True)
    return job


def flood(directory: str, seconds: float, flood_bytes: int) -> Job:
    """Rank 0 writes gigabytes to stderr before its steps; the console takes them as fast as cat can."""
    with _reader(stopped=False) as console:
        job = Job(directory, seconds, console, f"{directory}/logs", flood_bytes)
        job.wait(seconds + 300)
    return job


SCENARIOS: dict[str, Callable[[str, float, int], Job]] = {
    "undisturbed": undisturbed,
    "stopped": stopped,
    "unread": unread,
    "disk_full": disk_full,
    "flood": flood,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=12.0, help="length of each job")
    parser.add_argument("--flood-bytes", type=int, default=5 * 10**9, help="what one rank writes to stderr")


def run(args: argparse.Namespace) -> Figures:
    """Every scenario `args.rounds` times."""
    if os.geteuid() != 0:
        raise BenchError("mounting a small file system as the log disk needs root")
    medians: dict[str, list[float]] = {name: [] for name in SCENARIOS}
    longest: dict[str, list[float]] = {name: [] for name in SCENARIOS}
    peaks: list[float] = []
    for _ in range(args.rounds):
        for name, scenario in SCENARIOS.items():
            with tempfile.TemporaryDirectory(prefix="bench-pressure-") as directory:
                job = scenario(directory, args.seconds, args.flood_bytes)
                steps = job.steps()
            medians[name].append(statistics.median(steps))
            longest[name].append(max(steps))
            peaks.append(float(job.peak_bytes))
    figures = Figures()
    for name in SCENARIOS:
        figures.add(f"pressure.{name}_step_s", "s", medians[name])
        figures.add(f"pressure.{name}_longest_s", "s", longest[name])
    # The largest of all jobs, not the median: the limit holds for each.
    figures.add("pressure.rss_bytes", "bytes", [max(peaks)])
    return figures
