"""`bootseer report` on what real jobs have written."""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any

import pytest

BOOTSEER = os.path.join(os.path.dirname(sys.executable), "bootseer")
TRAIN = """
import os, sys, time
import bootseer
rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if sys.argv[1] == "die" and attempt == 0 and rank == 1:
    sys.exit(3)
time.sleep(float(sys.argv[2]) if rank == 1 else 0.0)
bootseer.heartbeat(1)
bootseer.heartbeat(2)
time.sleep(0.3)
"""


@pytest.fixture
def report(program, tmp_path):
    def call(*args: object) -> Any:
        run = program(BOOTSEER, "report", *args)
        assert run.status == 0, run.stderr
        assert run.stderr == ""
        return run.stdout

    return call


def test_a_job_of_two_ranks(bootrun, script, report, tmp_path) -> None:
    logs = tmp_path / "logs"
    path = script(TRAIN)
    done = bootrun("--nnodes", 1, "--nproc-per-node", 2, "--log-dir", logs, path, "live", 0.4)
    assert done.status == 0, done.stderr
    text = report(logs, "--html", tmp_path / "page.html", "--trace", tmp_path / "trace.json")
    head, second = text.splitlines()[:2]
    assert re.match(r"\S+, attempt 0: 2 ranks on 1 node, begun \d{4}-\d\d-\d\d", head)
    assert re.match(r"first step of all ranks after (0\.[4-9]\d|[1-9].*) s$", second)
    record = json.loads(report(logs, "--json"))
    assert (record["ranks"], record["nodes"], record["first_steps"]) == (2, 1, 2)
    assert record["clock"]["kind"] == "one node"
    assert {row["stage"] for row in record["stages"]} >= {"rendezvous", "spawn", "first_step"}
    first = {row["rank"]: row["stages"]["first_step"] for row in record["rank_rows"]}
    assert first[1] - first[0] > 0.3
    assert "first_step" in [each["stage"] for each in record["stragglers"]]  # others are this machine's
    assert record["slow"][0].startswith("first_step of rank 1 on ")
    assert record["path"][-1]["rank"] == 1
    assert record["path"][-1]["end_s"] == record["first_step_s"]
    line = re.search(r"started in ([\d.]+) s to the first step", done.stderr)
    assert line is not None
    # The line of bootrun counts from its agent's first event as well.
    assert abs(float(line[1]) - record["first_step_s"]) < 0.02
    assert record["run_id"] in (tmp_path / "page.html").read_text()
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) > 8


def test_a_job_that_restarts(bootrun, script, report, tmp_path) -> None:
    logs = tmp_path / "logs"
    path = script(TRAIN)
    done = bootrun(
        *("--nnodes", 1, "--nproc-per-node", 2, "--max-restarts", 1, "--log-dir", logs, path, "die", 0.1),
        deadline_s=60,
    )
    assert done.status == 0, done.stderr
    record = json.loads(report(logs, "--json"))
    assert [row["attempt"] for row in record["attempts"]] == [0, 1]
    assert record["slow"][0].startswith("rank 1 on ")
    assert " ended with status 3 after " in record["slow"][0]
    assert record["lost"]["ranks_without_first_step"] >= 1
    last = json.loads(report(logs, "--attempt", "last", "--json"))
    assert last["attempt"] == 1
    assert last["first_steps"] == 2
    fleet = json.loads(report("fleet", tmp_path, "--json"))
    (job,) = fleet["job_rows"]
    assert job["attempts"] == 2
    assert 0 < job["share"] < 1


FAILS_TWICE = """
import os, sys, bootseer
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 2:
    sys.exit(3)
bootseer.heartbeat(1)
"""


def test_backoff_is_a_stage(bootrun, script, report, tmp_path) -> None:
    logs = tmp_path / "logs"
    flags = (
        "--nnodes",
        1,
        "--nproc-per-node",
        1,
        "--max-restarts",
        2,
        "--same-error",
        "restart",
        "--log-dir",
        logs,
    )
    done = bootrun(*flags, script(FAILS_TWICE), deadline_s=60)
    assert done.status == 0, done.stderr
    assert "restart 2 of 2 in 1 s" in done.stderr
    assert "longest stage: backoff 1.00 s" in done.stderr
    stages = {row["stage"]: row["max_s"] for row in json.loads(report(logs, "--attempt", 2, "--json"))["stages"]}
    assert 0.9 < stages["backoff"] <= 1.001
    assert stages["rendezvous"] < 0.5


def test_two_nodes_with_directories_of_their_own(bootrun, script, report, tmp_path, free_port) -> None:
    path = script(TRAIN)
    nodes = [
        bootrun.start(
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port}", "--rdzv-id", "pair"),
            *("--rdzv-conf", f"is_host={int(number == 0)}", "--node-rank", number, "--nnodes", 2),
            *("--nproc-per-node", 2, "--log-dir", tmp_path / f"logs{number}", path, "live", 0.0),
        )
        for number in (0, 1)
    ]
    assert [node.wait(60).status for node in nodes] == [0, 0]
    # The coordinator's folder has everything; so have the folders of all nodes together.
    for where in (tmp_path / "logs0", tmp_path):
        record = json.loads(report(where, "--json"))
        assert record["run_id"] == "pair"
        assert [(row["rank"], row["first_step_s"] is not None) for row in record["rank_rows"]] == [
            (rank, True) for rank in range(4)
        ]
        assert record["notes"] == []
    alone = json.loads(report(tmp_path / "logs1", "--json"))
    assert [row["rank"] for row in alone["rank_rows"]] == [2, 3]


def test_before_and_after(bootrun, script, report, tmp_path) -> None:
    path = script(TRAIN)
    for name, slow in (("before", 1.5), ("after", 0.0)):
        run = bootrun("--nnodes", 1, "--nproc-per-node", 2, "--log-dir", tmp_path / name, path, "live", slow)
        assert run.status == 0, run.stderr
    record = json.loads(report(tmp_path / "before", tmp_path / "after", "--json"))
    assert record["first_step_change_s"] < -0.5
    text = report(tmp_path / "before", tmp_path / "after")
    assert re.search(r"^first_step ", text, re.MULTILINE)
    assert "times faster" in text
