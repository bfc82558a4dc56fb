"""`python -m bench warm`: a node is warmed for a job by the daemon, while another job trains on it (root).

The job and its store are those of `bench start`, on one node. In each round, on a node that has nothing:

    beside    a job trains (warm_train.py, one processor); after some seconds `bootseer warm --jobs --rate` fills
              the node's caches; what leaves the store then is counted, and what a step takes then and otherwise
    warmed    the job for which it was warmed starts, nothing in memory
    cold      the same on a node that has nothing

`warm.rate_share`: the most that left the store within WINDOW_S, over what --rate allows in that time.
`warm.step_ratio`: the median step while the daemon works over the median of the other steps. What remains of each
stage is `warm.warmed_STAGE_s`, beside what it is without (`warm.cold_STAGE_s`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from bench import netns
from bench.ckpt_run import BOOTSEER, ROOT
from bench.ckpt_server import SERVED, fetch
from bench.record import BenchError, Figures, Target, note
from bench.start import begin, describe, longest
from bench.start_made import prepare
from bench.start_ways import RATE_BYTES_PER_S, TECHNIQUES, Bench, Sample

ROUNDS = 5
RATE_MB_S = 50.0
WINDOW_S = 2.0
LOOK_S = 0.1
SETTLE_STEPS = 200  # the first ones are slower
ALONE_S = 6.0  # before and after
DEADLINE_S = 300.0
SCRIPT = "warm_train.py"
TARGETS = {
    "warm.rate_share": Target(at_most=1.05, samples=ROUNDS),
    "warm.step_ratio": Target(at_most=1.1, samples=ROUNDS),
    "warm.warmed_mb": Target(at_most=5, samples=ROUNDS),
}


class Beside(NamedTuple):
    """What a daemon did while a job trained."""

    took_s: float
    sent_bytes: int  # by the store
    rate_share: float
    alone_ms: float  # a step, without the daemon
    beside_ms: float  # and with it


class Node(Bench):
    """A node that trains and is warmed."""

    def run_beside(self, rate_bytes_per_s: float) -> Beside:
        """Raises: BenchError."""
        (host,) = self.nodes
        self._prepare("beside")
        own = self._own(host)
        shutil.copy2(os.path.join(ROOT, "bench", SCRIPT), os.path.join(own, "work"))
        steps = os.path.join(own, "work", "steps")
        with self._store_runs() as url:
            self._forget_memory()
            self._write_job(os.path.join(own, "jobs"), url)
            try:
                argv = [sys.executable, "-m", "launcher", "--standalone", "--log-dir", "training", SCRIPT, "steps"]
                self._start_on(host, argv, self._environ(url))
                _wait_for(steps, SETTLE_STEPS)
                began_ns = time.monotonic_ns()
                time.sleep(ALONE_S)  # it trains
                looks = [(time.monotonic(), served(url))]
                rate = ["--rate", f"{rate_bytes_per_s / 1e6:g}MB"]
                jobs = os.path.join(self._place, "jobs")
                argv = [BOOTSEER, "warm", "--jobs", jobs, "--once", *rate]
                daemon = self._start_on(host, argv, self._environ(url))
                while daemon.poll() is None:
                    time.sleep(LOOK_S)
                    looks.append((time.monotonic(), served(url)))
                    if looks[-1][0] - looks[0][0] > DEADLINE_S:
                        raise BenchError(f"the daemon has not ended:\n{self._said(host)}")
                if daemon.returncode:
                    raise BenchError(f"the daemon has ended with {daemon.returncode}:\n{self._said(host)}")
                time.sleep(ALONE_S)
            finally:
                host.kill()
        alone, beside = step_times(read_steps(steps), began_ns, looks[0][0], looks[-1][0])
        sent = looks[-1][1] - looks[0][1]
        share = max_within(looks, WINDOW_S) / (rate_bytes_per_s * WINDOW_S)
        medians = (statistics.median(each) * 1e3 for each in (alone, beside))
        return Beside(looks[-1][0] - looks[0][0], sent, share, *medians)

    def _write_job(self, directory: str, url: str) -> None:
        os.makedirs(directory, mode=0o755, exist_ok=True)
        words = [*self._features(url, TECHNIQUES), "start_train.py", "out", "100"]
        with open(os.path.join(directory, "job.toml"), "w", encoding="utf-8") as file:
            file.write(f'[job]\nfolder = "{self._place}/work"\ncommand = {json.dumps(words)}\n')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument(
        "--rate", type=float, default=RATE_MB_S, help=f"MB/s for the daemon (default: {RATE_MB_S:g})"
    )
    parser.add_argument(
        "--folder", default="", help="where all lies, on a real disk (default: that of bench start)"
    )


def run(args: argparse.Namespace) -> Figures:
    """Measures and returns the figures."""
    above = begin(args.folder)
    made = prepare(above)
    directory = tempfile.mkdtemp(prefix="warm-", dir=above)
    try:
        with netns.Hosts(2) as hosts:
            netns.shape(hosts.hosts[:1], RATE_BYTES_PER_S, "1mb")
            return to_figures(*measure(Node(made, hosts, 1, directory), args.rounds, args.rate * 1e6))
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def measure(node: Node, rounds: int, rate_bytes_per_s: float) -> tuple[list[Beside], list[Sample], list[Sample]]:
    """All rounds: the daemon's, starts after it, and starts without."""
    note("a first job, whose recordings later ones find")
    node.set_store(known=False)
    node.run("first", publishes=True)
    node.keep_store()
    node.set_store(known=True)
    besides, warmed, cold = [], [], []
    for number in range(rounds):
        for is_warmed in (True, False) if number % 2 == 0 else (False, True):
            node.clear()
            if not is_warmed:
                cold.append(node.run("cold"))
                note(f"round {number + 1} of {rounds}: cold {describe(cold[-1])}")
                continue
            beside = node.run_beside(rate_bytes_per_s)
            besides.append(beside)
            note(f"round {number + 1} of {rounds}: {describe_beside(beside)}")
            warmed.append(node.run("second"))
            note(f"round {number + 1} of {rounds}: warmed {describe(warmed[-1])}")
    return besides, warmed, cold


def describe_beside(beside: Beside) -> str:
    """A line for who watches."""
    sent = (
        f"{beside.sent_bytes / 1e6:.0f} MB in {beside.took_s:.1f} s, at most {beside.rate_share:.2f} of the rate"
    )
    return f"{sent}; a step takes {beside.beside_ms:.2f} ms, else {beside.alone_ms:.2f}"


def to_figures(besides: Sequence[Beside], warmed: Sequence[Sample], cold: Sequence[Sample]) -> Figures:
    """In the order in which they are read."""
    figures = Figures()
    figures.add("warm.rate_share", "of the rate", [each.rate_share for each in besides])
    figures.add_ratio("warm.step_ratio", [each.beside_ms for each in besides], [each.alone_ms for each in besides])
    figures.add_ratio("warm.cold_ratio", [each.seconds for each in cold], [each.seconds for each in warmed])
    figures.add("warm.daemon_s", "s", [each.took_s for each in besides])
    figures.add("warm.daemon_mb", "MB out of the store", [each.sent_bytes / 1e6 for each in besides])
    figures.add("warm.alone_step_ms", "ms a step", [each.alone_ms for each in besides])
    figures.add("warm.beside_step_ms", "ms a step", [each.beside_ms for each in besides])
    for name, samples in (("warmed", warmed), ("cold", cold)):
        figures.add(f"warm.{name}_s", "s", [each.seconds for each in samples])
        figures.add(f"warm.{name}_mb", "MB out of the store", [each.sent_bytes / 1e6 for each in samples])
        for stage in sorted({stage for each in samples for node in each.stages for stage, _, _ in node}):
            figures.add(f"warm.{name}_{stage}_s", "s", [longest(each, stage) for each in samples])
    return figures


# ---- what was seen -------------------------------------------------------------------------------------------


def served(url: str) -> int:
    """Bytes that the store has sent until now."""
    return int(json.loads(fetch(f"{url}{SERVED}"))[1])


def read_steps(path: str) -> list[int]:
    """When steps have ended, in nanoseconds of the monotonic clock."""
    with open(path, "rb") as file:
        data = file.read()
    return [at_ns for (at_ns,) in struct.iter_unpack("<q", data[: len(data) // 8 * 8])]


def _wait_for(path: str, steps: int) -> None:
    end_s = time.monotonic() + DEADLINE_S
    while not os.path.exists(path) or os.path.getsize(path) < 8 * steps:
        if time.monotonic() > end_s:
            raise BenchError(f"{path}: nothing is trained")
        time.sleep(LOOK_S)


def step_times(
    ended_ns: Sequence[int], from_ns: int, begin_s: float, end_s: float
) -> tuple[list[float], list[float]]:
    """PURE: seconds of the steps outside of a span, and within it. Raises: BenchError without some of both.

    Args: from_ns: earlier ones do not count; begin_s, end_s: the span, by the same clock.
    """
    alone, beside = [], []
    for before, after in pairwise(ended_ns):
        if before < from_ns:
            continue
        if after / 1e9 <= begin_s or before / 1e9 >= end_s:
            alone.append((after - before) / 1e9)
        elif before / 1e9 >= begin_s and after / 1e9 <= end_s:
            beside.append((after - before) / 1e9)
    if not alone or not beside:
        raise BenchError("no steps beside the daemon, or none without it")
    return alone, beside


def max_within(looks: Sequence[tuple[float, int]], window_s: float) -> float:
    """PURE: the most that was sent within so many seconds. Args: looks: when, and how much until then.

    Between two looks it is taken to be sent evenly. Of a shorter time all counts.
    """
    ends = [looks[0][0] + window_s, *(at_s for at_s, _ in looks), *(at_s + window_s for at_s, _ in looks)]
    return max(_sent_at(looks, end_s) - _sent_at(looks, end_s - window_s) for end_s in ends)


def _sent_at(looks: Sequence[tuple[float, int]], at_s: float) -> float:
    if at_s <= looks[0][0]:
        return looks[0][1]
    for (low_s, low), (high_s, high) in pairwise(looks):
        if at_s <= high_s:
            return low + (high - low) * (at_s - low_s) / (high_s - low_s) if high_s > low_s else high
    return looks[-1][1]
