"""`python -m bench hosts`: what two hosts do when one dies, is cut off for a while, is cut off for good, or has
another clock. For each: what happened, after how many seconds, and who was blamed.

The hosts are network namespaces (bench/netns.py). Ranks are stdlib scripts that talk to each other over a socket,
so that the network matters to them; heartbeats are the default ones unless the row says otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

from bench import netns
from bench.record import BenchError, Figures

ROUNDS = 1
PORT = "29511"
# Rank 0 listens on the master port, the others connect; each says once a tick that it lives.
RANK = """
import os, socket, sys, time
rank, addr = int(os.environ["RANK"]), (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
attempt, world = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["WORLD_SIZE"]
print("rank", rank, "of", world, "restart", attempt, flush=True)
if rank == 0:
    server = socket.create_server(addr if addr[0][0].isdigit() else ("", addr[1]), reuse_port=False)
    peers = [server.accept()[0] for _ in range(int(world) - 1)]
else:
    end = time.time() + 10
    while True:
        try:
            peers = [socket.create_connection(addr, timeout=1)]
            break
        except OSError:
            if time.time() > end: raise
            time.sleep(0.02)
open(os.environ["FOLDER"] + "/ready-%d-%s" % (rank, world), "w").close()
for step in range(int(os.environ["STEPS"])):
    for peer in peers:
        peer.settimeout(None)
        word = b"e" if rank == 0 and os.path.exists(os.environ["FOLDER"] + "/end") else b"x"
        peer.sendall(word)
        heard = peer.recv(1)
        if b"e" in (word, heard):
            sys.exit(0)
        if not heard:
            time.sleep(0.03)
            print("rank", rank, "lost its peer", flush=True)
            sys.exit(4)
    if rank == 1 and os.path.exists(os.environ["FOLDER"] + "/die"):
        sys.exit(3)
    time.sleep(0.05)
"""


class Outcome(NamedTuple):
    """What came of a scenario."""

    what: str
    seconds: float  # from the event to the outcome
    blamed: str  # who the job blames, "" for nobody
    statuses: tuple[int | None, ...]  # exit status of bootrun on each host, None: killed with its host
    outputs: tuple[str, ...]


class Job:
    """bootrun on each of two hosts, rendezvous at the first one."""

    def __init__(
        self, hosts: netns.Hosts, *flags: str, steps: int = 100000, ahead_s: tuple[int, int] = (0, 0)
    ) -> None:
        self._hosts = hosts
        script = f"{hosts.folder}/rank.py"
        with open(script, "w", encoding="utf-8") as file:
            file.write(RANK)
        self.outputs = [f"{hosts.folder}/{host.name}.out" for host in hosts.hosts]
        environ = {**os.environ, "FOLDER": hosts.folder, "STEPS": str(steps), "PYTHONUNBUFFERED": "1"}
        endpoint = f"{hosts.hosts[0].address}:{PORT}"
        self.agents: list[subprocess.Popen[bytes]] = []
        for number, host in enumerate(hosts.hosts):
            argv = [sys.executable, "-m", "launcher", "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
            argv += ["--node-rank", str(number), "--log-dir", f"{hosts.folder}/logs-{host.name}", *flags, script]
            self.agents.append(host.start(argv, environ, self.outputs[number], ahead_s[number]))

    def wait_ready(self, world: int, deadline_s: float = 20.0) -> None:
        """Until all ranks of a world of this size talk to each other."""
        names = [f"{self._hosts.folder}/ready-{rank}-{world}" for rank in range(world)]
        self.wait_for(lambda: all(os.path.exists(name) for name in names), deadline_s, f"{world} ranks at work")

    def wait_for(self, condition: Callable[[], bool], deadline_s: float, what: str) -> float:
        """Seconds until the condition holds."""
        began_s = time.monotonic()
        while not condition():
            if time.monotonic() - began_s > deadline_s:
                raise BenchError(f"not within {deadline_s:g} s: {what}\n" + "\n".join(self.read()))
            time.sleep(0.01)
        return time.monotonic() - began_s

    def wait_ended(self, deadline_s: float, *numbers: int) -> float:
        """Seconds until the agents on these hosts have ended."""
        agents = [self.agents[number] for number in numbers]
        return self.wait_for(lambda: all(agent.poll() is not None for agent in agents), deadline_s, "the end")

    def read(self) -> tuple[str, ...]:
        """What each agent and its ranks have printed."""
        texts = []
        for path in self.outputs:
            with open(path, encoding="utf-8", errors="replace") as file:
                texts.append(file.read())
        return tuple(texts)

    def wait_said(self, number: int, words: str) -> None:
        """Until the agent on this host has said so."""
        self.wait_for(lambda: words in self.read()[number], 60, words)

    def outcome(self, what: str, seconds: float, blamed: str = "") -> Outcome:
        return Outcome(what, seconds, blamed, tuple(agent.poll() for agent in self.agents), self.read())

    def has_started(self, count: int) -> bool:
        """Whether the first host's ranks have been started `count` times."""
        return self.read()[0].count("rank 0 of") >= count


def node_killed(hosts: netns.Hosts) -> Outcome:
    """Elastic job, the second host dies: the first goes on alone."""
    job = Job(hosts, "--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=5")
    job.wait_ready(2)
    hosts.hosts[1].kill()
    seconds = job.wait_for(lambda: "rank 0 of 1" in job.read()[0], 30, "the survivor's new world")
    return job.outcome("went on with 1 node", seconds, _blamed(job.read()[0]))


def node_killed_fixed(hosts: netns.Hosts) -> Outcome:
    """Fixed job without restarts, the second host dies: the job ends and says why."""
    job = Job(hosts, "--nnodes", "2")
    job.wait_ready(2)
    hosts.hosts[1].kill()
    seconds = job.wait_ended(30, 0)
    return job.outcome("ended", seconds, _blamed(job.read()[0]))


def cut_for_a_while(hosts: netns.Hosts) -> Outcome:
    """The link is down for 3 s: nothing is restarted."""
    job = Job(hosts, "--nnodes", "2", steps=120)
    job.wait_ready(2)
    began_s = time.monotonic()
    hosts.hosts[1].cut()
    time.sleep(3)
    hosts.hosts[1].join()
    job.wait_ended(60, 0, 1)
    restarted = job.has_started(2)
    return job.outcome("restarted" if restarted else "went on, no restart", time.monotonic() - began_s)


def cut_beyond_the_limit(hosts: netns.Hosts, nodes: str = "2", conf: str = "last_call_timeout=5") -> Outcome:
    """The link is down for longer than heartbeats allow: who cannot do without the other waits for it, else takes
    it back."""
    job = Job(hosts, "--nnodes", nodes, "--rdzv-conf", conf, "--shutdown-timeout", "2")
    job.wait_ready(2)
    began_s = time.monotonic()
    hosts.hosts[1].cut()
    if nodes == "2":
        for number, words in enumerate(("no message from node2", "no message from the coordinator")):
            job.wait_said(number, words)
    else:
        job.wait_for(lambda: "rank 0 of 1" in job.read()[0], 60, "the survivor's new world")
    hosts.hosts[1].join()
    if nodes == "2":
        job.wait_said(0, "is reachable again")
    else:
        job.wait_for(lambda: job.read()[0].count("rank 0 of 2") == 2, 60, "a world of both hosts")
        job.wait_for(lambda: job.read()[1].count("rank 1 of 2") == 2, 60, "a world of both hosts")
    with open(f"{hosts.folder}/end", "w", encoding="utf-8"):
        pass
    job.wait_ended(60, 0, 1)
    restarted = job.has_started(2)
    return job.outcome("restarted" if restarted else "went on, no restart", time.monotonic() - began_s)


def cut_for_good(hosts: netns.Hosts, conf: str = "last_call_timeout=5") -> Outcome:
    """The link stays down: the first host goes on alone, the second ends; default heartbeat limit (15 s)."""
    job = Job(hosts, "--nnodes", "1:2", "--rdzv-conf", conf, "--shutdown-timeout", "2")
    job.wait_ready(2)
    hosts.hosts[1].cut()
    seconds = job.wait_for(lambda: "rank 0 of 1" in job.read()[0], 40, "the survivor's new world")
    job.wait_ended(90, 1)
    return job.outcome("went on with 1 node; the other ended", seconds, _blamed(job.read()[0]))


def clocks_apart(hosts: netns.Hosts, ahead_s: tuple[int, int]) -> Outcome:
    """Rank 1 exits with 3, rank 0 loses its peer and exits with 4 soon after; one host's clock is ahead."""
    job = Job(hosts, "--nnodes", "2", ahead_s=ahead_s)
    job.wait_ready(2)
    began_s = time.monotonic()
    with open(f"{hosts.folder}/die", "w", encoding="utf-8"):
        pass
    job.wait_ended(30, 0, 1)
    return job.outcome("ended", time.monotonic() - began_s, _root_cause(job.read()[0]))


SCENARIOS: dict[str, Callable[[netns.Hosts], Outcome]] = {
    "node_killed": node_killed,
    "node_killed_fixed": node_killed_fixed,
    "cut_3s": cut_for_a_while,
    "cut_beyond_limit": cut_beyond_the_limit,
    "cut_for_good": cut_for_good,
    "clock_of_cause_ahead": lambda hosts: clocks_apart(hosts, (0, 5)),
    "clock_of_victim_ahead": lambda hosts: clocks_apart(hosts, (5, 0)),
}


def _blamed(output: str) -> str:
    found = re.search(r"lost node (\S+) ", output)
    return found.group(1) if found else ""


def _root_cause(output: str) -> str:
    _, _, rest = output.partition("Root Cause")
    found = re.search(r"rank\s*:\s*(\d+)", rest)
    return f"rank {found.group(1)}" if found else ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=sorted(SCENARIOS), action="append", help="run just this scenario")


def run(args: argparse.Namespace) -> Figures:
    """Each scenario `args.rounds` times."""
    reason = netns.why_not()
    if reason:
        raise BenchError(reason)
    figures = Figures()
    for name in args.only or SCENARIOS:
        seconds = []
        for _ in range(args.rounds):
            with netns.Hosts(2) as hosts:
                outcome = SCENARIOS[name](hosts)
            seconds.append(outcome.seconds)
            print(
                f"{name}: {outcome.what} after {outcome.seconds:.2f} s; blamed: {outcome.blamed or 'nobody'}; "
                f"exit statuses {outcome.statuses}",
                file=sys.stderr,
            )
        figures.add(f"hosts.{name}_s", "s", seconds)
    return figures
