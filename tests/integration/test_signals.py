"""Signals to bootrun: all ranks hear them, the exit status says them, forwarded ones end nothing."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests import support

WAITING = """
import os, signal, sys, time
name = os.environ["RANK"]
def note(signum, frame):
    with open(f"heard-{name}-{signum}", "w"): pass
    if signum == signal.SIGTERM: sys.exit(0)
for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2): signal.signal(signum, note)
with open("up-" + name, "w"): pass
while not os.path.exists("finish"): time.sleep(0.01)
"""
STUBBORN = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
with open("up-" + os.environ["RANK"], "w"): pass
time.sleep(100)
"""
Script = Callable[..., str]


def wait_up(program: support.Program, count: int = 2) -> None:
    names = [os.path.join(program.dir, f"up-{rank}") for rank in range(count)]
    support.wait_until(lambda: all(os.path.exists(name) for name in names))


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_exit_status_names_the_signal_and_nothing_failed(
    bootrun: support.Programs, script: Script, signum: signal.Signals
) -> None:
    waiting = "import os, signal; open('up-' + os.environ['RANK'], 'w').close(); signal.pause()"
    program = bootrun.start("--standalone", "--nproc-per-node", 2, script(waiting))
    wait_up(program)
    program.signal(signum)
    run = program.wait(10)
    assert run.status == 128 + signum
    assert "FAILED" not in run.stderr
    assert run.stderr.count("stopping the job") == 1


def test_second_signal_shortens_the_wait(bootrun: support.Programs, script: Script) -> None:
    program = bootrun.start("--standalone", "--nproc-per-node", 2, "--shutdown-timeout", 60, script(STUBBORN))
    wait_up(program)
    program.signal(signal.SIGTERM)
    support.wait_until(lambda: "stopping attempt" in program.stderr)
    program.signal(signal.SIGTERM)
    run = program.wait(15)
    assert run.status == 143
    assert "was killed" in run.stderr


def test_forwarded_signals_reach_the_ranks_and_the_job_goes_on(bootrun: support.Programs, script: Script) -> None:
    program = bootrun.start("--standalone", "--nproc-per-node", 2, script(WAITING))
    wait_up(program)
    for signum in (signal.SIGUSR1, signal.SIGUSR2):
        program.signal(signum)
        names = [os.path.join(program.dir, f"heard-{rank}-{int(signum)}") for rank in (0, 1)]
        support.wait_until(lambda names=names: all(os.path.exists(name) for name in names))
    with open(os.path.join(program.dir, "finish"), "w", encoding="utf-8"):
        pass
    assert program.wait(10).status == 0


def test_handled_signal_is_not_forwarded_only(bootrun: support.Programs, script: Script) -> None:
    program = bootrun.start(
        "--standalone", "--nproc-per-node", 1, "--signals-to-handle", "SIGUSR1", script(STUBBORN), "--x"
    )
    wait_up(program, 1)
    program.signal(signal.SIGUSR1)
    assert program.wait(10).status == 128 + signal.SIGUSR1


@pytest.mark.parametrize("victim", [0, 1])
def test_signal_to_one_node_stops_all_nodes(
    bootrun: support.Programs, script: Script, free_port: int, victim: int
) -> None:
    endpoint = f"127.0.0.1:{free_port}"
    flags = ("--nnodes", 2, "--node-rank")
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, script(WAITING))
    nodes = [bootrun.start(*flags, rank, *where) for rank in (0, 1)]
    for rank, node in enumerate(nodes):
        support.wait_until(lambda rank=rank, node=node: os.path.exists(os.path.join(node.dir, f"up-{rank}")))
    nodes[victim].signal(signal.SIGTERM)
    assert [node.wait(10).status for node in nodes] == [143, 143]
    for rank, node in enumerate(nodes):
        assert os.path.exists(os.path.join(node.dir, f"heard-{rank}-{int(signal.SIGTERM)}"))


def test_node_scope_lets_an_elastic_job_go_on(bootrun: support.Programs, script: Script, free_port: int) -> None:
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}", script(WAITING))
    nodes: list[support.Program] = []
    for rank in (0, 1):
        nodes.append(bootrun.start("--nnodes", "1:2", "--signal-scope", "node", "--node-rank", rank, *where))
        # The first one hosts the coordinator, without which the job cannot go on.
        support.wait_until(lambda: "no secret" in nodes[-1].stderr)
    for rank, node in enumerate(nodes):
        support.wait_until(lambda rank=rank, node=node: os.path.exists(os.path.join(node.dir, f"up-{rank}")))
    os.unlink(os.path.join(nodes[0].dir, "up-0"))
    nodes[1].signal(signal.SIGTERM)
    assert nodes[1].wait(10).status == 143
    wait_up(nodes[0], 1)
    with open(os.path.join(nodes[0].dir, "finish"), "w", encoding="utf-8"):
        pass
    run = nodes[0].wait(10)
    assert run.status == 0
    assert "lost node" in run.stderr


def test_signal_before_the_other_nodes_are_there(
    bootrun: support.Programs, script: Script, free_port: int
) -> None:
    for rank in (0, 1):
        program = bootrun.start(
            *("--nnodes", 2, "--node-rank", rank, "--master-addr", "127.0.0.1", "--master-port", free_port),
            script("raise SystemExit(9)"),
        )
        support.wait_until(lambda program=program: len(support.descendants(program.pid)) >= 2)
        support.wait_until(lambda program=program: _handles_sigterm(program.pid))
        program.signal(signal.SIGTERM)
        assert program.wait(10).status == 143


def _handles_sigterm(pid: int) -> bool:
    with open(f"/proc/{pid}/status", encoding="ascii") as file:
        [caught] = [line.split()[1] for line in file if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)
