"""`python -m bench kill`: SIGKILL of bootrun, of its guard, and of both at once, at random moments of a job.

The job's ranks have children in sessions of their own, one of them twice forked with a cleaned environment
except for the mark that this bench searches for. After each kill the whole process table is searched for the
mark; what is still there after DEADLINE_S counts as left. Figures: what was left, and how long it took.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

from bench import shm
from bench.record import BenchError, Figures, Target

ROUNDS = 50
TARGETS = {"kill.left_processes": Target(at_most=0.0), "kill.left_files": Target(at_most=0.0)}
DEADLINE_S = 10.0
MARK = "BOOTSEER_BENCH_KILL"
VICTIMS = ("bootrun", "guard", "both")
RANK = f"""
import os, subprocess, sys, time
mark = dict([("{MARK}", os.environ["{MARK}"]), ("PATH", os.environ["PATH"])])
subprocess.Popen(["sleep", "300"], start_new_session=True)
subprocess.Popen(["sh", "-c", "setsid sleep 300 & exit 0"], start_new_session=True, env=mark)
open(os.environ["READY"] + os.environ["RANK"], "w").close()
time.sleep(300)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=None, help="of the random moments (printed; default: new)")


def find_marked(mark: str) -> list[int]:
    """Processes whose environment holds this job's mark, zombies left out."""
    needle = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                if needle in file.read().split(b"\0"):
                    found.append(int(entry))
        except OSError:
            continue
    return found


def find_supervisor(bootrun: int) -> int | None:
    """The guard: the child of bootrun's child, the sentinel; None while there is none."""
    for watchdog in _children(bootrun):
        for guard in _children(watchdog):
            return guard
    return None


def _children(pid: int) -> list[int]:
    try:
        with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
            return [int(child) for child in file.read().split()]
    except OSError:
        return []


def kill_once(victim: str, delay_s: float, directory: str) -> tuple[int, float]:
    """Starts a job, kills `victim` after `delay_s`; how many processes were left and after how many seconds
    all were gone."""
    mark = os.urandom(8).hex()
    environ = {**os.environ, MARK: mark, "READY": f"{directory}/ready"}
    script = f"{directory}/rank.py"
    with open(script, "w", encoding="utf-8") as file:
        file.write(RANK)
    argv = [sys.executable, "-m", "launcher", "--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "1"]
    argv += ["--log-dir", f"{directory}/logs", "-r", "3", script]
    job = subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(delay_s)
    guard = find_supervisor(job.pid)
    targets = [job.pid] if victim == "bootrun" else [guard] if victim == "guard" else [job.pid, guard]
    for pid in targets:
        if pid is not None:
            os.kill(pid, signal.SIGKILL)
    killed_s = time.monotonic()
    if victim == "guard" and guard is None:
        job.send_signal(signal.SIGKILL)  # it had not come up yet
    try:
        job.wait(DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise BenchError(f"bootrun did not end within {DEADLINE_S:g} s after SIGKILL of {victim}") from error
    while (left := find_marked(mark)) and time.monotonic() - killed_s < DEADLINE_S:
        time.sleep(0.005)
    took_s = time.monotonic() - killed_s
    for pid in left:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return len(left), took_s


def run(args: argparse.Namespace) -> Figures:
    """`args.rounds` kills of each victim."""
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4), "little")
    print(f"seed {seed}", file=sys.stderr)
    chance = random.Random(seed)
    before = shm.files()
    left: list[float] = []
    took: dict[str, list[float]] = {victim: [] for victim in VICTIMS}
    for number in range(args.rounds):
        victim = VICTIMS[number % len(VICTIMS)]
        directory = tempfile.mkdtemp(prefix="bench-kill-")
        try:
            count, took_s = kill_once(victim, chance.uniform(0.0, 0.5), directory)
        finally:
            shutil.rmtree(directory)
        left.append(float(count))
        took[victim].append(took_s)
    figures = Figures()
    # The median would hide a single process that is left.
    figures.add("kill.left_processes", "processes in all kills", [sum(left)])
    figures.add("kill.left_files", "files in /dev/shm", [float(len(shm.left(before)))])
    for victim, seconds in took.items():
        if seconds:
            figures.add(f"kill.{victim}_gone_s", "s", seconds)
    return figures
