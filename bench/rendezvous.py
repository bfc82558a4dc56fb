"""`python -m bench rendezvous --agents N`: thousands of simulated nodes at one real coordinator, over real TCP.

Measured in each round: from the first connection to everybody holding its ranks; memory of the coordinator; bytes
on the wire for each node until then; the coordinator's CPU while all are idle and ping; from the loss of one node
to everybody holding the next world. The coordinator and at least two processes of nodes share this machine's
cores, so the times are those of all together. With more than 1,000 nodes, 1,000 are measured beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import time
from types import TracebackType
from typing import Any

from bench.record import BenchError, Figures, Target, note

ROUNDS = 3
SECRET = "a secret of the bench, which protects nothing"
TARGETS = {
    "rendezvous.seconds": Target(at_most=10.0),
    "rendezvous.rss_bytes": Target(at_most=2**30),
    "rendezvous.bytes_per_agent": Target(at_most=4096),
    "rendezvous.bytes_per_agent_vs_1000": Target(at_least=0.8, at_most=1.2),
    "rendezvous.memory_per_agent": Target(at_most=4096),
    "rendezvous.idle_cores": Target(at_most=0.1),
    "rendezvous.again_s": Target(at_most=5.0),
}
SMALL = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of this bench."""
    parser.add_argument("--agents", type=int, default=10_000, help="simulated nodes")
    parser.add_argument("--processes", type=int, default=2, help="processes that simulate them")
    parser.add_argument("--idle", type=float, default=15.0, help="seconds over which the idle cost is measured")
    parser.add_argument(
        "--settle", type=float, default=8.0, help="seconds before that, for the quick pings to end"
    )
    parser.add_argument("--open", action="store_true", help="without a secret: no challenge, no MACs")


def run(args: argparse.Namespace) -> Figures:
    """Measures, see the module's docstring."""
    if args.agents < 2 * args.processes or args.processes < 2:
        raise BenchError("at least two processes with two nodes each are needed")
    samples: dict[str, list[float]] = {}
    for number in range(args.rounds):
        note(f"round {number + 1} of {args.rounds}: {args.agents} nodes")
        measured = measure(args, args.agents, number)
        for name, value in measured.items():
            samples.setdefault(name, []).append(value)
        if args.agents > SMALL:
            small = measure(args, SMALL, number)
            samples.setdefault("bytes_per_agent_vs_1000", []).append(
                measured["bytes_per_agent"] / small["bytes_per_agent"]
            )
            for name in ("seconds", "bytes_per_agent", "memory_per_agent", "again_s"):
                samples.setdefault(f"{name}_1000", []).append(small[name])
    figures = Figures()
    for name, values in samples.items():
        figures.add(f"rendezvous.{name}", UNITS[name.removesuffix("_1000")], values)
    return figures


UNITS = {
    "seconds": "s",
    "cpu_s": "s",
    "rss_bytes": "bytes",
    "memory_per_agent": "bytes",
    "bytes_per_agent": "bytes",
    "bytes_per_agent_vs": "ratio",
    "idle_cores": "cores",
    "again_s": "s",
}


class Process:
    """A process of bench/nodes.py: orders in, answers out."""

    def __init__(self, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.nodes", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        )
        self._pending = b""

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def order(self, *words: str) -> None:
        """Sends an order."""
        assert self._process.stdin is not None
        self._process.stdin.write((" ".join(words) + "\n").encode())
        self._process.stdin.flush()

    def wait(self, name: str, patience_s: float) -> dict[str, Any]:
        """The next answer, which must have this field."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        end_s = time.monotonic() + patience_s
        while b"\n" not in self._pending:
            if not select.select([fd], [], [], max(0.0, end_s - time.monotonic()))[0]:
                raise BenchError(f"no answer with {name!r} within {patience_s:g} s")
            data = os.read(fd, 65536)
            if not data:
                raise BenchError(f"a process ended (status {self._process.wait()}) instead of saying {name!r}")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if name not in said:
            raise BenchError(f"{said} instead of {name!r}")
        return said

    def cpu_s(self) -> float:
        """CPU time it has used so far."""
        with open(f"/proc/{self._process.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(args: argparse.Namespace, agents: int, number: int) -> dict[str, float]:
    """One round with a new coordinator and new nodes."""
    secret = "-" if args.open else SECRET.replace(" ", "-")
    share = [agents // args.processes + (index < agents % args.processes) for index in range(args.processes)]
    with Process("coordinator", agents, secret) as coordinator:
        start = coordinator.wait("port", 30)
        nodes = [
            Process("nodes", sum(share[:index]), count, agents, start["port"], secret)
            for index, count in enumerate(share)
        ]
        try:
            return measure_job(args, agents, number, coordinator, nodes, start["rss"])
        finally:
            for each in nodes:
                each.close()


def measure_job(
    args: argparse.Namespace, agents: int, number: int, coordinator: Process, nodes: list[Process], empty_rss: int
) -> dict[str, float]:
    """Start, idle time, loss of a node and end of one job."""
    cpu_s = coordinator.cpu_s()
    for index, each in enumerate(nodes):
        each.order("join", f"127.0.{1 + number % 200}.{1 + index}")
    began_s, all_there_s = wait_world(nodes, 0, agents, 120)
    result = {"seconds": all_there_s - began_s, "cpu_s": coordinator.cpu_s() - cpu_s}
    coordinator.order("statistics")
    there = coordinator.wait("members", 30)
    result["bytes_per_agent"] = (there["bytes_in"] + there["bytes_out"]) / agents
    result["memory_per_agent"] = (there["rss"] - empty_rss) / agents

    if agents == args.agents:
        time.sleep(args.settle)
        cpu_s, from_s = coordinator.cpu_s(), time.monotonic()
        time.sleep(args.idle)
        result["idle_cores"] = (coordinator.cpu_s() - cpu_s) / (time.monotonic() - from_s)

    nodes[0].order("kill")
    killed_s = nodes[0].wait("killed", 30)["killed"]
    result["again_s"] = wait_world(nodes, 1, agents - 1, 60)[1] - killed_s

    for each in nodes:
        each.order("end")
    for each in nodes:
        finished = each.wait("finished", 60)["finished"]
        if set(finished) != {"0"}:
            raise BenchError(f"the job did not end well: {finished}")
    coordinator.order("statistics")
    ended = coordinator.wait("members", 30)
    if ended["members"] or ended["strange"] or ended["refused"]:
        raise BenchError(f"the coordinator counts what should not be: {ended}")
    result["rss_bytes"] = ended["rss_most"]
    return result


def wait_world(nodes: list[Process], attempt: int, size: int, patience_s: float) -> tuple[float, float]:
    """First connection and last World of an attempt; every rank must have been given once."""
    answers = [each.wait("attempt", patience_s) for each in nodes]
    ranks = sorted(rank for each in answers for rank in each["ranks"])
    if ranks != list(range(size)) or any(each["attempt"] != attempt or each["size"] != size for each in answers):
        raise BenchError(f"attempt {attempt}: not every node got its place among {size}")
    return min(each["began"] for each in answers), max(each["last"] for each in answers)
