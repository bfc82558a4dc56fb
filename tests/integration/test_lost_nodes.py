"""Nodes that others take for lost although they are not: stopped or starved bootruns, connections that are cut.

Real jobs with short heartbeats; what ranks do is seen by the files that each start of a rank leaves.
"""

from __future__ import annotations

import glob
import os
import signal
from collections.abc import Callable

import pytest

from tests import support

Script = Callable[..., str]

# Leaves a file for each start, and runs until it may finish: a rank of a job whose bootruns stand still.
RUNS = """
import os, sys, time
env = os.environ
name = "up-%s-of-%s-%s" % (env["RANK"], env["WORLD_SIZE"], env["TORCHELASTIC_RESTART_COUNT"])
with open(name + ".part", "w") as file: file.write(str(os.getpid()))
os.rename(name + ".part", "%s-%d" % (name, os.getpid()))
end = time.monotonic() + 60
while not os.path.exists("finish"):
    if time.monotonic() > end or os.path.exists("fail-" + env["RANK"] + "-" + env["TORCHELASTIC_RESTART_COUNT"]):
        sys.exit(3)
    time.sleep(0.01)
"""
RECEIVED_OF = "is reachable again"
GIVEN_UP = "the job continued without this node"


class Job:
    """Nodes of one job on this host, that share a folder; the first one hosts the coordinator."""

    def __init__(self, bootrun: support.Programs, script: str, port: int, nodes: str, silence_s: float) -> None:
        self.dir = bootrun.dir
        self.nodes: list[support.Program] = []
        conf = f"keep_alive_interval={silence_s / 4},keep_alive_max_attempt=4,last_call_timeout=10,join_timeout=5"
        for number in range(2):
            self.nodes.append(
                bootrun.start(
                    *("--nnodes", nodes, "--node-rank", number, "--max-restarts", 1, "--rdzv-conf", conf),
                    *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", script),
                )
            )
            support.wait_until(lambda: "no secret" in self.nodes[-1].stderr)
        self.wait_starts("0-of-2-0", "1-of-2-0")

    def starts(self) -> list[str]:
        """Rank, world and restart count of each start of a rank, without pids."""
        names = (os.path.basename(path) for path in glob.glob(os.path.join(self.dir, "up-*")))
        return sorted(name[3:].rpartition("-")[0] for name in names if not name.endswith(".part"))

    def pid_of(self, start: str) -> int:
        [path] = glob.glob(os.path.join(self.dir, f"up-{start}-*"))
        return int(path.rpartition("-")[2])

    def wait_starts(self, *starts: str) -> None:
        support.wait_until(lambda: set(starts) <= set(self.starts()), 20.0, f"{starts} among {self.starts()}")

    def wait_said(self, node: int, text: str, deadline_s: float = 20.0) -> None:
        support.wait_until(lambda: text in self.nodes[node].stderr, deadline_s, f"{text!r} of node {node}")

    def make(self, name: str) -> None:
        with open(os.path.join(self.dir, name), "w", encoding="utf-8"):
            pass

    def finish(self) -> list[int]:
        self.make("finish")
        return [node.wait(20.0).status for node in self.nodes]


@pytest.fixture
def start(bootrun: support.Programs, script: Script, free_port: int) -> Callable[[str, float], Job]:
    return lambda nodes, silence_s: Job(bootrun, script(RUNS), free_port, nodes, silence_s)


Start = Callable[[str, float], Job]


@pytest.mark.parametrize("nodes", ["2", "1:2"])
def test_a_bootrun_that_stood_still_is_taken_back_with_its_ranks(start: Start, nodes: str) -> None:
    job = start(nodes, 1.0)
    job.nodes[1].signal(signal.SIGSTOP)
    job.wait_said(0, "no message from")
    job.nodes[1].signal(signal.SIGCONT)
    job.wait_said(0, RECEIVED_OF)
    assert job.finish() == [0, 0]
    assert job.starts() == ["0-of-2-0", "1-of-2-0"], "no rank was started anew"
    assert not any("gone" in node.stderr for node in job.nodes)


def test_nodes_wait_for_a_coordinator_that_stands_still(start: Start) -> None:
    job = start("2", 1.0)
    job.nodes[0].signal(signal.SIGSTOP)
    job.wait_said(1, "no message from the coordinator")
    job.nodes[0].signal(signal.SIGCONT)
    assert job.finish() == [0, 0]
    assert job.starts() == ["0-of-2-0", "1-of-2-0"]
    assert not any("is gone" in node.stderr for node in job.nodes)


@pytest.mark.parametrize(
    ("nodes", "without", "again"), [("1:2", ("0-of-1-0",), 0), ("2", (), 1)], ids=["elastic", "fixed"]
)
def test_who_was_given_up_comes_back_as_a_member(
    start: Start, nodes: str, without: tuple[str, ...], again: int
) -> None:
    """By then its old ranks are of no use; where the others could not go on that was a restart of the budget."""
    job = start(nodes, 0.3)
    job.nodes[1].signal(signal.SIGSTOP)
    job.wait_said(0, "lost node")
    job.wait_starts(*without)
    support.wait_until(lambda: "waiting up to" in job.nodes[0].stderr or without, 20.0)
    job.nodes[1].signal(signal.SIGCONT)
    # In the elastic job the newcomer gives everybody a new world, which costs no restart.
    support.wait_until(lambda: job.starts().count(f"1-of-2-{again}") == 2 - again, 20.0)
    assert job.finish() == [0, 0]
    assert GIVEN_UP in job.nodes[1].stderr and "is gone" not in job.nodes[1].stderr


def test_a_rank_that_died_meanwhile_is_the_failure_that_it_is(start: Start) -> None:
    job = start("2", 1.0)
    job.nodes[1].signal(signal.SIGSTOP)
    os.kill(job.pid_of("1-of-2-0"), signal.SIGKILL)
    job.wait_said(0, "no message from")
    job.nodes[1].signal(signal.SIGCONT)
    job.wait_starts("0-of-2-1", "1-of-2-1")
    assert job.finish() == [0, 0]
    assert "restart 1 of 1" in job.nodes[0].stderr and "lost node" not in job.nodes[0].stderr


def test_who_returns_after_the_job_has_ended_is_reported_how_it_ended(start: Start) -> None:
    job = start("1:2", 0.3)
    job.nodes[1].signal(signal.SIGSTOP)
    job.wait_starts("0-of-1-0")
    job.make("finish")
    assert job.nodes[0].wait(20.0).status == 0
    job.nodes[1].signal(signal.SIGCONT)
    run = job.nodes[1].wait(20.0)
    assert run.status == 0
    assert GIVEN_UP in run.stderr and "is gone" not in run.stderr
