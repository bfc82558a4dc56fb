"""Hundreds of restarts in a row in one job with forked ranks: does anything grow?

Two ranks; in each attempt rank 1 waits until both are at work and dies. Sampled before each death: memory,
descriptors and threads of bootrun, its sentinel, its guard and the preloaded process, and the number of all their
descendants. Compared are the first and the last WINDOW restarts (memory: the medians; what is counted: the median
of the first and the least of the last, since descriptors also come and go). In them the processes that wait for
the next attempt are awaited, so that they are always counted; those between follow as fast as they can.
Case `bare` preloads one small module, case `torch` what a job with torch does; its ranks make an optimizer step.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import tempfile
import time
from typing import NamedTuple

from bench.fork import FORK_SERVER, children_of, with_descendants
from bench.fork_fallbacks import BOOTRUN, PREFIX, Job, read_events
from bench.record import BenchError, Figures, Target, note

ROUNDS = 1
COUNT = 200
WINDOW = 20
RANKS = 2
PROCESSES = ("bootrun", "sentinel", "guard", "preloaded")
CASES = ("bare", "torch")
DEADLINE_S = 30.0
TARGETS = {
    **{
        f"restarts.{case}_{process}_growth_mib": Target(at_most=1.0)
        for case in CASES
        for process in PROCESSES
        if process != "preloaded"
    },
    **{f"restarts.{case}_preloaded_growth_mib": Target(at_most=2.0) for case in CASES},
    **{
        f"restarts.{case}_{what}_growth": Target(at_most=0)
        for case in CASES
        for what in ("descriptor", "thread", "process")
    },
    **{f"restarts.{case}_restarts": Target(at_least=COUNT) for case in CASES},
}
BARE = """
import os, sys, time
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
open("at-%s-%s" % (attempt, rank), "w").close()
if attempt == os.environ["TORCHELASTIC_MAX_RESTARTS"]:
    sys.exit(0)
while rank == "0" or not os.path.exists("go-" + attempt):
    time.sleep(0.002)
os._exit(3)
"""
TORCH = (
    """
import torch
weight = torch.nn.Parameter(torch.ones(8))
weight.sum().backward()
torch.optim.AdamW([weight]).step()
"""
    + BARE
)


class Sample(NamedTuple):
    """One process at one moment."""

    rss_mib: float
    descriptors: int
    threads: int


class Moment(NamedTuple):
    """The job in one attempt."""

    samples: dict[str, Sample]
    processes: int  # all descendants of bootrun
    restart_s: float  # from telling the last attempt to die to all ranks of this one at work


def read_sample(pid: int) -> Sample:
    """What a process holds: memory of its own, without files that it has mapped."""
    values = {}
    with open(f"/proc/{pid}/status", encoding="utf-8") as file:
        for line in file:
            name, _, value = line.partition(":")
            values[name] = value.split()
    anonymous_mib = (int(values["RssAnon"][0]) + int(values["RssShmem"][0])) / 1024
    return Sample(anonymous_mib, len(os.listdir(f"/proc/{pid}/fd")), int(values["Threads"][0]))


def count_watches(pid: int) -> int:
    """Descriptors with which a process watches files; those of past attempts are closed a second later."""
    directory, count = f"/proc/{pid}/fd", 0
    for name in os.listdir(directory):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            count += os.readlink(os.path.join(directory, name)).endswith("inotify")
    return count


def take(job: Job, restart_s: float) -> Moment:
    """Looks at all processes of the job."""
    bootrun = job.programs[0].pid
    # Beside it there may be a process that looks for dumps, for the page of the failure: it ends by itself.
    [watchdog] = [pid for pid in children_of(bootrun) if children_of(pid)]
    [guard] = children_of(watchdog)
    fork_server = job.find(FORK_SERVER)
    if len(fork_server) != 1:
        raise BenchError(f"{len(fork_server)} preloaded processes\n{job.text()}")
    pids = dict(zip(PROCESSES, (bootrun, watchdog, guard, fork_server[0]), strict=True))
    return Moment(
        {name: read_sample(pid) for name, pid in pids.items()}, len(with_descendants([bootrun])) - 1, restart_s
    )


def run_job(case: str, count: int, window: int, directory: str) -> list[Moment]:
    """A job of so many restarts; what it held in each attempt but the last."""
    job = start_job(case, count, directory)
    moments = []
    reported_s = time.monotonic()
    try:
        for attempt in range(count):
            ranks = [f"at-{attempt}-{rank}" for rank in range(RANKS)]
            job.wait_until(lambda ranks=ranks: job.has(*ranks), f"attempt {attempt} runs")  # type: ignore[misc]
            restart_s = time.monotonic() - reported_s
            if attempt < window or attempt >= count - window:
                # With torch a process that has what the first step needs takes the place of the first one.
                wanted = 2 if case == "torch" else 1
                job.wait_until(lambda wanted=wanted: job.preloads() >= wanted, "it is preloaded")  # type: ignore[misc]
                if attempt:
                    job.wait_until(job.has_standby, "processes are parked")
                bootrun = job.programs[0].pid
                job.wait_until(lambda pid=bootrun: count_watches(pid) <= 1, "the last attempt is tidied up")  # type: ignore[misc]
                moments.append(take(job, restart_s))
            job.write(f"go-{attempt}")
            reported_s = time.monotonic()
        status = job.programs[0].wait(DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise BenchError(f"still running after {DEADLINE_S:g} s\n{job.text()[-4000:]}") from None
    finally:
        job.close()
    how = [event["attrs"].get("how") for event in read_events(directory) if event["name"] == "rank_started"]
    if status != 0 or PREFIX in job.text() or how != ["fork"] * RANKS * (count + 1):
        kinds = {each: how.count(each) for each in how}
        raise BenchError(f"exit status {status}, ranks were started by {kinds}\n{job.text()[-4000:]}")
    return moments


def start_job(case: str, count: int, directory: str) -> Job:
    with open(os.path.join(directory, "script.py"), "w", encoding="utf-8") as file:
        file.write({"bare": BARE, "torch": TORCH}[case])
    preload = ["--preload", "none,json"] if case == "bare" else []
    options = ["--standalone", "--nproc-per-node", str(RANKS), "--fork-ranks", "on", *preload]
    options += [
        "--max-restarts",
        str(count),
        "--restart-backoff",
        "0",
        "--log-dir",
        os.path.join(directory, "logs"),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "BOOTSEER_CACHE_DIR": os.path.join(directory, "cache")}
    return Job(directory, [BOOTRUN, *options, "script.py"], environ, "")


def growth(first: list[float], last: list[float]) -> float:
    """How much more the last ones are, at the median."""
    return statistics.median(last) - statistics.median(first)


def stays(first: list[float], last: list[float]) -> float:
    """How many more are always there in the end."""
    return min(last) - statistics.median(first)


def add_case(figures: Figures, case: str, count: int, moments: list[Moment], window: int) -> None:
    """The figures of one job, and its table on stdout."""
    first, last = moments[1:window], moments[-window:]  # at the first one nothing has been parked
    print(f"case {case}, {count} restarts: medians of the first and the last {window}\n")
    print("| process | memory of its own, MiB | descriptors | threads |\n|---|---:|---:|---:|")
    grown: dict[str, list[float]] = {"descriptors": [], "threads": []}
    for process in PROCESSES:
        cells = []
        for field in Sample._fields:
            values = [[float(getattr(each.samples[process], field)) for each in part] for part in (first, last)]
            before, after = (statistics.median(part) for part in values)
            cells.append(f"{before:.2f} -> {after:.2f}" if field == "rss_mib" else f"{before:g} -> {after:g}")
            if field == "rss_mib":
                figures.add(f"restarts.{case}_{process}_growth_mib", "MiB", [growth(*values)])
            else:
                grown[field].append(stays(*values))
        print(f"| {process} | {' | '.join(cells)} |")
    processes = [[float(each.processes) for each in part] for part in (first, last)]
    print("\nall processes below bootrun: {:g} -> {:g}\n".format(*map(statistics.median, processes)))
    figures.add(f"restarts.{case}_descriptor_growth", "descriptors of any process", [max(grown["descriptors"])])
    figures.add(f"restarts.{case}_thread_growth", "threads of any process", [max(grown["threads"])])
    figures.add(f"restarts.{case}_process_growth", "processes", [stays(*processes)])
    figures.add(f"restarts.{case}_restarts", "restarts", [float(count)])
    figures.add(f"restarts.{case}_first_s", "s", [each.restart_s for each in first])
    figures.add(f"restarts.{case}_last_s", "s", [each.restart_s for each in last])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--count", type=int, default=COUNT, help="restarts in a row")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")


def run(args: argparse.Namespace) -> Figures:
    """Runs the jobs one after the other."""
    window = min(WINDOW, args.count // 2)
    if window < 2:
        raise BenchError("--count must be at least 4")
    figures = Figures()
    for case in args.cases:
        with tempfile.TemporaryDirectory(prefix="bench-restarts-") as directory:
            began_s = time.monotonic()
            moments = run_job(case, args.count, window, directory)
        note(f"{case}: {args.count} restarts in {time.monotonic() - began_s:.0f} s")
        add_case(figures, case, args.count, moments, window)
    return figures
