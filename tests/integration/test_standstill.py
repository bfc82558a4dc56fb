"""Jobs that stand still: seen, told with what each rank does, and ended where that was asked for."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import support

Script = Callable[..., str]

# Steps together, as a collective has it: a rank waits until all have come to a step.
STEPS = """
import os, socket, sys, time
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
hooks = sys.modules.get("_bootseer_rank")
beat = getattr(hooks, "heartbeat", None) or (lambda step, metrics: None)
address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    server = socket.create_server(("", address[1]))
    others = [server.accept()[0] for _ in range(size - 1)]
else:
    while True:
        try:
            others = [socket.create_connection(address)]
            break
        except ConnectionRefusedError:
            time.sleep(0.01)

def all_reduce(step):
    for each in others:
        if rank:
            each.sendall(b"x")
        assert each.recv(1)
    if rank == 0:
        for each in others:
            each.sendall(b"x")

def train(stop_at, how, last):
    for step in range(last if attempt == "0" else 20):
        if attempt == "0" and rank == size - 1 and step == stop_at:
            how()
        all_reduce(step)
        beat(step, {})
        sum(range(100_000))
        time.sleep(0.01)
"""
SLEEPS = STEPS + "\ndef data_loader(): time.sleep(1000)\ntrain(60, data_loader, 99)\n"
SPINS = STEPS + "\ndef endless():\n    while True: pass\ntrain(60, endless, 99)\n"
STOPS = STEPS + "\ntrain(60, lambda: os.kill(os.getpid(), 19), 99)\n"
HEALTHY = STEPS + "\ntrain(99, lambda: None, 150)\n"
FLAGS = ("--hang-least", 2, "--log-dir", "logs")


def found(directory: str) -> dict[str, Any]:
    """The report for programs."""
    (path,) = Path(directory).glob("logs/*/standstill-0.json")
    record: dict[str, Any] = json.loads(path.read_text())
    assert path.with_suffix(".txt").read_text().startswith("the job hangs")
    return record


def page(directory: str) -> dict[str, Any]:
    """The failure's page."""
    (path,) = Path(directory).glob("logs/*/failure-0.json")
    record: dict[str, Any] = json.loads(path.read_text())
    assert (record["class"], record["ranks"]) == ("hang", [1])
    assert "stacks of 2 ranks" in record["stacks"]
    assert record["stages"]["seen_s"] > 1
    return record


def test_by_default_it_is_only_reported(bootrun: support.Programs, script: Script) -> None:
    program = bootrun.start("--standalone", "--nproc-per-node", 2, *FLAGS, script(SPINS))
    support.wait_until(lambda: "endless" in program.stderr, 60)  # the file comes before
    assert found(bootrun.dir)["ranks"] == [1]
    assert program.process.poll() is None, "it goes on"
    program.signal(signal.SIGTERM)
    assert program.wait(60).status == 143
    assert page(bootrun.dir)["rule"] == "--on-hang report"
    report = subprocess.run(
        [sys.executable, "-m", "bootseer", "report", "logs"],
        cwd=bootrun.dir, capture_output=True, text=True, timeout=60, check=True,
    ).stdout  # fmt: skip
    (line,) = [line for line in report.splitlines() if "the job hangs" in line]
    assert line.startswith("  attempt 0: noticed after ") and line.endswith("(standstill-0.txt)"), line
    assert "rank 1 is in endless (" in line


def test_a_frozen_rank_is_named_without_its_stack(bootrun: support.Programs, script: Script) -> None:
    words = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 1, *FLAGS, "--on-hang", "restart")
    run = bootrun(*words, "--shutdown-timeout", 1, script(STOPS), deadline_s=90)
    assert run.status == 0, run.stderr
    assert "bootrun: restart 1 of 1: bootrun has ended attempt 0, class hang\n" in run.stderr
    record = found(bootrun.dir)
    assert record["ranks"] == [1]
    does = {tuple(group["ranks"]): group["does"]["source"] for group in record["groups"]}
    assert does[0,] == "handler"
    assert does[1,] != "handler"
    record = page(bootrun.dir)
    assert record["action"] == "restart 1 of 1"
    assert record["stages"]["spawn_s"] is not None


@pytest.mark.slow
def test_two_nodes(bootrun: support.Programs, script: Script, free_port: int) -> None:
    path = script(SLEEPS)
    words = ("--nnodes", 2, "--nproc-per-node", 1, "--rdzv-endpoint", f"localhost:{free_port}", "--rdzv-id", "x")
    words += ("--rdzv-backend", "c10d", "--max-restarts", 1, "--hang-least", 2, "--on-hang", "restart")
    programs = [bootrun.start(*words, "--log-dir", f"logs{node}", path) for node in range(2)]
    runs = [program.wait(90) for program in programs]
    assert [run.status for run in runs] == [0, 0], runs
    kept = [path for node in range(2) for path in Path(bootrun.dir).glob(f"logs{node}/*/standstill-0.json")]
    assert len(kept) == 1, "at the node with rank 0"
    assert all("the job hangs" in run.stderr for run in runs)
    record = json.loads(kept[0].read_text())
    does = {tuple(group["ranks"]): group["does"] for group in record["groups"]}
    assert (does[1,]["frames"][0][2], does[1,]["source"]) == ("data_loader", "handler")
    assert does[0,]["frames"][0][2] == "all_reduce"
    assert "stopping attempt 0: the job hangs" in runs[0].stderr
    assert "data_loader" in runs[0].stderr + runs[1].stderr


@pytest.mark.slow
def test_a_job_without_restarts_ends_by_it(bootrun: support.Programs, script: Script) -> None:
    words = ("--standalone", "--nproc-per-node", 2, *FLAGS, "--on-hang", "restart", script(SLEEPS))
    run = bootrun(*words, deadline_s=90)
    assert run.status == 1
    assert "bootrun: error: the job hangs" in run.stderr


@pytest.mark.parametrize("words", [("--on-hang", "off"), ("--rank-hooks", "off"), ("--events-dir", os.devnull)])
def test_nothing_is_said_of_what_is_not_watched_or_goes_on(
    bootrun: support.Programs, script: Script, words: tuple[str, ...]
) -> None:
    run = bootrun("--standalone", "--nproc-per-node", 2, *FLAGS, *words, script(HEALTHY), deadline_s=60)
    assert run.status == 0, run.stderr
    assert "the job hangs" not in run.stderr
