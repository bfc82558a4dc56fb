"""What looking at ranks from outside costs: a step and a heartbeat in a rank, a rank's start, a look of the agent.

In a rank: the hook of torch's optimizers as launcher/in_rank/bootstrap.py makes it, called as torch calls it, less
an empty hook; bootseer.heartbeat, and one with an event, of which there is one a second at most; opening the page,
with the handler for stacks. In the agent: CPU time of one look at RANKS processes that have pages, log files and a
child each, times one look in LOOK_EVERY_S, and of bringing a heartbeat a second of each into its event file; and
the time until all their stacks are had. What steps of a job of two ranks become longer, with its 95 % interval, by
hooks in its ranks, looks at them and heartbeats: two jobs in turns (turns.py).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

from bench.record import BenchError, Figures, Target
from bench.turns import measure_steps
from launcher.base.loop import Loop
from launcher.in_rank.bootstrap import event_fields, pack_text
from launcher.monitor.samples.heartbeats import LOOK_S, HeartbeatCopier
from launcher.monitor.samples.sampler import Sampler
from launcher.monitor.samples.stack_collector import StackCollector
from launcher.monitor.samples.stacks import RankStacks, Source
from launcher.ranks.stats_page import PAGE_BYTES, StatsPageFile, StatsPages

ROUNDS = 5
RANKS = 8
LOOK_EVERY_S = 2.0
LOOKS = 200
STEP_JOBS, STEP_TURNS, STEPS = 8, 10, 20
TARGETS = {
    "supervise.step_us": Target(at_most=1.0),
    "supervise.heartbeat_us": Target(at_most=2.0),
    "supervise.heartbeat_event_us": Target(at_most=2.0),
    "supervise.agent_cores": Target(at_most=0.01),
}
IN_A_RANK = """
import sys, time
began_s = time.perf_counter()
from launcher.in_rank import bootstrap as inside
inside.open_page("")
ready_s = time.perf_counter()
page = inside.open_page(sys.argv[1])
opened_s = time.perf_counter() - ready_s
events = inside.Events(sys.argv[2], "run", "node", 0, 0)
first_step = inside.FirstStep(events, page)
hook = first_step._make_counter(page)
import bootseer
sys.modules[inside.NAME] = inside
inside.heartbeat = inside.make_heartbeat(events, first_step, page)
optimizer, empty, metrics = object(), (), {}
def beat(step):
    bootseer.heartbeat(step, loss=1.5)
def nothing(*_step):
    pass
def measure(function, *args, count=50000):
    best = 1e9
    for _ in range(5):
        began_s = time.thread_time()
        for _ in range(count):
            function(*args)
        best = min(best, time.thread_time() - began_s)
    return best / count * 1e6
print(measure(hook, optimizer, empty, metrics) - measure(nothing, optimizer, empty, metrics),
      measure(beat, 7) - measure(nothing, 7), end=" ")
inside.HEARTBEAT_EVERY_NS = 0
time.sleep(1.1)  # the last event's second
print(measure(beat, 7) - measure(nothing, 7), opened_s * 1e6)
"""
RANK = """
import subprocess, sys, time
from launcher.in_rank import bootstrap as inside
page = inside.open_page(sys.argv[1])
page.pulse()
child = subprocess.Popen(["sleep", "1000"])
try:
    sys.stdin.read()
finally:
    child.kill()
    child.wait()
"""


class _Logs(NamedTuple):
    stdout_path: str
    stderr_path: str


class _Rank(NamedTuple):
    rank: int
    pid: int
    started_ns: int
    page_file: str
    logs: _Logs

    @property
    def stacks_file(self) -> str:
        return self.page_file

    @property
    def events_file(self) -> str:
        return f"{self.logs.stdout_path}.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None beside the common ones."""


def run(args: argparse.Namespace) -> Figures:
    """`args.rounds` rounds of everything."""
    samples: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        pages = StatsPages()
        with tempfile.TemporaryDirectory(prefix="bench-supervise-") as directory:
            try:
                found = {**_in_a_rank(pages.renew(1, False)[0], directory), **_in_the_agent(pages, directory)}
            finally:
                pages.close()
        for name, value in found.items():
            samples.setdefault(name, []).append(value)
    figures = Figures()
    for name, values in samples.items():
        figures.add(f"supervise.{name}", {"us": "us", "cores": "cores", "s": "s"}[name.rpartition("_")[2]], values)
    plain = ["--rank-hooks", "off", "--on-hang", "off"]
    pairs = measure_steps(plain, [], STEP_JOBS, STEP_TURNS, STEPS)
    figures.add("supervise.train_step_ms", "ms", [each.plain[0] * 1e3 for each in pairs])
    figures.add("supervise.train_step_added_us", "us", [each.added() * 1e6 for each in pairs])
    figures.add("supervise.train_step_added_cpu_us", "us", [each.added(1) * 1e6 for each in pairs])
    return figures


def _in_a_rank(page: StatsPageFile, directory: str) -> dict[str, float]:
    ran = subprocess.run(
        [sys.executable, "-c", IN_A_RANK, page.given, f"{directory}/events.jsonl"], capture_output=True, text=True
    )
    if ran.returncode:
        raise BenchError(f"the rank failed: {ran.stderr}")
    names = ("step_us", "heartbeat_us", "heartbeat_event_us", "open_us")
    return dict(zip(names, map(float, ran.stdout.split()), strict=True))


def _in_the_agent(pages: StatsPages, directory: str) -> dict[str, float]:
    processes = []
    ranks = []
    try:
        for number, page in enumerate(pages.renew(RANKS, False)):
            logs = _Logs(f"{directory}/out{number}", f"{directory}/err{number}")
            with open(logs.stdout_path, "ab") as out, open(logs.stderr_path, "ab") as err:
                process = subprocess.Popen(
                    [sys.executable, "-c", RANK, page.given], stdin=subprocess.PIPE, stdout=out, stderr=err
                )
            processes.append(process)
            ranks.append(_Rank(number, process.pid, time.monotonic_ns(), page.path, logs))
        sampler = Sampler(ranks)
        end_s = time.monotonic() + 60
        while any(facts.steps != 1 or facts.state != "S" for facts in sampler.look(time.monotonic())):
            if time.monotonic() > end_s:
                raise BenchError("the ranks do not come up")
            time.sleep(0.05)
        began_s = time.process_time()
        for _ in range(LOOKS):
            sampler.look(time.monotonic())
        look_s = (time.process_time() - began_s) / LOOKS
        sampler.close()
        heartbeats_s = _bring_heartbeats(ranks)
        return {
            "look_us": look_s * 1e6,
            "beats_us": heartbeats_s * 1e6,
            "agent_cores": look_s / LOOK_EVERY_S + heartbeats_s / LOOK_S,
            "stacks_s": _collect(ranks),
        }
    finally:
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(30)


def _bring_heartbeats(ranks: list[_Rank]) -> float:
    """CPU seconds for a heartbeat of each rank."""
    loop, took_s = Loop(), 0.0
    for rank in ranks:
        open(rank.events_file, "wb").close()
    heartbeats = HeartbeatCopier(loop, ranks, "run", "node", 0)
    fds = [os.open(rank.page_file, os.O_WRONLY) for rank in ranks]
    for number in range(1, LOOKS + 1):
        note = pack_text(number, time.monotonic_ns(), event_fields(7, {"loss": 1.5}))
        for fd in fds:
            os.pwrite(fd, note, PAGE_BYTES - len(note))
        began_s = time.process_time()
        heartbeats.bring()
        took_s += time.process_time() - began_s
    heartbeats.stop()
    for fd in fds:
        os.close(fd)
    loop.close()
    for rank in ranks:
        with open(rank.events_file, "rb") as file:
            if sum(b'"attrs":{"loss":1.5}' in line for line in file) != LOOKS:
                raise BenchError("heartbeats are missing")
    return took_s / LOOKS


def _collect(ranks: list[_Rank]) -> float:
    loop = Loop()
    found: list[dict[int, RankStacks]] = []
    began_s = time.monotonic()
    collector = StackCollector(loop, ranks, py_spy="")
    collector.collect(found.append)
    while not found:
        loop.run_once(1.0)
    took_s = time.monotonic() - began_s
    loop.close()
    if any(each.source is not Source.HANDLER for each in found[0].values()):
        raise BenchError(f"stacks are missing: {found[0]}")
    return took_s
