"""`bootseer status` and the pages of failures with real jobs: what is seen, and that nothing is left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import support

Script = Callable[..., str]
BOOTSEER = os.path.join(support.SCRIPTS, "bootseer")

# Counts 100 steps a second; where a file says so, a rank ends by it.
STEPS = """
import os, sys, time
beat = sys.modules["_bootseer_rank"].heartbeat
for step in range(100_000):
    beat(1000 + step, {})
    time.sleep(0.01)
    if os.path.exists("end"):
        break
"""
# Comes as far as step 3 in each attempt.
NO_FURTHER = """
import sys
for step in range(4):
    sys.modules["_bootseer_rank"].heartbeat(step, {})
raise RuntimeError("no further")
"""


def ask(program: support.Programs, environ: dict[str, str | None], *args: str) -> tuple[int, dict[str, Any]]:
    run = program(BOOTSEER, "status", "--json", *args, env=environ)
    found: dict[str, Any] = json.loads(run.stdout)
    return run.status, found


def pages(directory: str) -> list[dict[str, Any]]:
    paths = sorted(Path(directory).glob("logs/*/failure-*.json"))
    assert all(path.with_suffix(".txt").read_text().startswith("failure ") for path in paths)
    return [json.loads(path.read_text()) for path in paths]


def test_a_job_is_seen_while_it_runs_and_its_failures_are_kept(
    bootrun: support.Programs, program: support.Programs, script: Script, tmp_path: Path
) -> None:
    environ: dict[str, str | None] = {"BOOTSEER_RUNTIME": os.fspath(tmp_path / "rt")}
    words = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 2, "--log-dir", "logs")
    job = bootrun.start(*words, script(STEPS), env=environ)
    sockets = tmp_path / "rt" / "jobs"
    support.wait_until(lambda: sockets.is_dir() and os.listdir(sockets), 30, "its socket")
    status, found = ask(program, environ)
    (seen,) = found["jobs"]
    assert (status, seen["pid"], seen["state"]) == (0, job.pid, "running")
    assert (seen["attempt"], seen["waits_for"]) == (0, "")
    assert [rank["rank"] for rank in seen["ranks"]] == [0, 1]
    for rank in seen["ranks"]:
        assert rank["step"] == 999 + rank["steps"] > 1000
        assert 1 < rank["steps_per_s"] < 101
        assert rank["rss_bytes"] > 1 << 20
        assert rank["process"] != "T"
    victim = seen["ranks"][1]["pid"]
    os.kill(victim, signal.SIGSTOP)
    support.wait_until(lambda: ask(program, environ)[1]["jobs"][0]["ranks"][1]["process"] == "T", 20, "stopped")
    os.kill(victim, signal.SIGKILL)
    support.wait_until(lambda: pages(bootrun.dir), 20, "a page")
    support.wait_until(lambda: pages(bootrun.dir)[0]["stages"]["first_step_s"], 20, "the first step after it")
    (page,) = pages(bootrun.dir)
    assert (page["rank"], page["pid"], page["class"]) == (1, victim, "killed")
    assert all(0 <= seconds < 20 for seconds in page["stages"].values()), page
    text = program(BOOTSEER, "status", str(job.pid), env=environ)
    assert f"attempt 0: rank 1 on {page['node']} (pid {victim}) was ended by SIGKILL" in text.stdout, text
    assert "restarts    1 (--max-restarts 2)" in text.stdout
    Path(bootrun.dir, "end").touch()
    assert job.wait(30).status == 0
    assert os.listdir(sockets) == []
    run = program(BOOTSEER, "status", env=environ)
    assert (run.status, run.stdout) == (1, "")
    assert "no job of this user runs on this node" in run.stderr


def test_a_killed_bootrun_leaves_no_socket(
    bootrun: support.Programs, program: support.Programs, script: Script, tmp_path: Path
) -> None:
    environ: dict[str, str | None] = {"BOOTSEER_RUNTIME": os.fspath(tmp_path / "rt")}
    job = bootrun.start("--standalone", "--on-hang", "off", script(STEPS), env=environ)
    sockets = tmp_path / "rt" / "jobs"
    support.wait_until(lambda: sockets.is_dir() and os.listdir(sockets), 30, "its socket")
    (rank,) = ask(program, environ)[1]["jobs"][0]["ranks"]
    assert 1 < rank["steps_per_s"] < 101, "also where nothing watches the ranks"
    job.signal(signal.SIGKILL)
    job.wait(10)
    support.wait_until(lambda: not os.listdir(sockets), 20, "taken away by its guard")


def test_a_job_that_gets_no_further_is_given_up(bootrun: support.Programs, script: Script) -> None:
    words = ("--standalone", "--nproc-per-node", 2, "--max-restarts", 9, "--give-up-status", 93)
    run = bootrun(*words, "--restart-backoff", 0, "--log-dir", "logs", script(NO_FURTHER))
    assert run.status == 93, run.stderr
    assert "none of the last 3 attempts has got beyond step 3" in run.stderr
    found = pages(bootrun.dir)
    assert [page["number"] for page in found] == [0, 1, 2, 3]
    assert [page["next_attempt"] for page in found] == [1, 2, 3, None]
    assert "--no-progress restart" in found[-1]["rule"]


def test_status_that_cannot_be_had_costs_a_line_and_never_the_job(
    bootrun: support.Programs, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "rt").write_text("a file")
    environ: dict[str, str | None] = {"BOOTSEER_RUNTIME": os.fspath(tmp_path / "rt")}
    run = bootrun("--standalone", script("import time; time.sleep(2.5)"), env=environ)
    assert run.status == 0
    assert run.stderr.count("bootseer status does not see this job") == 1, run.stderr


@pytest.mark.slow
def test_two_nodes_and_what_they_wait_for(
    bootrun: support.Programs, program: support.Programs, script: Script, free_port: int, tmp_path: Path
) -> None:
    environ: dict[str, str | None] = {"BOOTSEER_RUNTIME": os.fspath(tmp_path / "rt")}
    words = ("--nnodes", 2, "--rdzv-endpoint", f"localhost:{free_port}", "--rdzv-id", "run7")
    words += ("--rdzv-backend", "c10d", "--max-restarts", 1, script(STEPS))
    nodes = [bootrun.start("--log-dir", "logs", *words, env=environ)]
    sockets = tmp_path / "rt" / "jobs"
    support.wait_until(lambda: sockets.is_dir() and os.listdir(sockets), 30, "its socket")
    (seen,) = ask(program, environ)[1]["jobs"]
    assert seen["waits_for"].startswith("other nodes")
    assert seen["ranks"] == []
    nodes.append(bootrun.start("--log-dir", "logs", *words, env=environ))

    def both() -> list[dict[str, Any]] | None:
        jobs = ask(program, environ, "run7")[1]["jobs"]
        is_there = len(jobs) == 2 and all(job["ranks"] and job["ranks"][0]["step"] for job in jobs)
        return jobs if is_there else None

    jobs = support.wait_until(both, 60, "both at work")
    assert jobs is not None
    assert sorted(job["node_rank"] for job in jobs) == [0, 1]
    assert sum(job["coordinator"] is not None for job in jobs) == 1
    (victim,) = [job["ranks"][0]["pid"] for job in jobs if job["node_rank"] == 1]
    os.kill(victim, signal.SIGKILL)
    support.wait_until(lambda: pages(bootrun.dir), 30, "a page")
    (page,) = pages(bootrun.dir)
    assert (page["rank"], page["node_rank"], page["pid"]) == (1, 1, victim)
    Path(bootrun.dir, "end").touch()
    assert [node.wait(30).status for node in nodes] == [0, 0]
