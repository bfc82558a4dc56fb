"""Every step of the restart ladder on one real job of two nodes and three spares, told by the job's events."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import support

# Two of these processes on each of two nodes at a time; what rank 3 says in each attempt.
FAILS = """
import builtins, os, sys, time
says = [
    "RuntimeError: something odd",
    "RuntimeError: connect: Network is unreachable",
    "RuntimeError: something odd",
    "RuntimeError: Uncorrectable ECC error encountered",
    "RuntimeError: loss is nan",
    "RuntimeError: loss is nan",
    "KeyError: x",
    "KeyError: x",
]
kind, _, text = says[int(os.environ["TORCHELASTIC_RESTART_COUNT"])].partition(": ")
open(f"{sys.argv[1]}/up-{os.environ['RANK']}", "w").close()
while os.environ["RANK"] != "3" or not os.path.exists(f"{sys.argv[1]}/go"):
    time.sleep(0.01)
raise getattr(builtins, kind)(text)
"""
POST_MORTEM = "cut -d ' ' -f 3 /proc/${BOOTSEER_RANK_PIDS#*:}/stat; echo rank $BOOTSEER_FAILED_RANKS"
ROLLBACK = "grep -o 'class.: .[a-z]*' $BOOTSEER_FAILURE_PAGE; echo rolled back for $BOOTSEER_FAILURE_CLASS"
REPLAY = (
    f"{support.SCRIPTS}/bootseer replay --json --hosts $BOOTSEER_HOSTS --group-size $BOOTSEER_GROUP_SIZE "
    "--run 'test $BOOTSEER_REPLAY_HOSTS != n3'"
)
AS_HOST = 'hostname "$0" && exec "$@"'


def events(directory: str) -> list[dict[str, Any]]:
    """What the nodes have written, each in its order."""
    paths = sorted(Path(directory).glob("logs-*/*/events/agent-*.jsonl"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


@pytest.mark.system
def test_each_step_is_taken_once(
    program: support.Programs, script: Callable[..., str], tmp_path: Path, free_port: int
) -> None:
    path = script(FAILS)

    def start(node: int, **env: str) -> support.Program:
        return program.start(
            *("unshare", "--uts", "sh", "-c", AS_HOST, f"n{node}", support.BOOTRUN),
            *("--nnodes", 2, "--nproc-per-node", 2, "--rdzv-backend", "c10d", "--rdzv-id", "ladder"),
            *("--rdzv-endpoint", f"localhost:{free_port}", "--max-restarts", 20, "--restart-backoff", 0),
            *("--fork-ranks", "on", "--preload", "none", "--record-start", "off", "--give-up-status", 93),
            *("--post-mortem", POST_MORTEM, "--stop-checks", "auto", "--log-dir", f"logs-{node}"),
            *("--rollback-command", ROLLBACK, "--replay-command", REPLAY, path, tmp_path),
            env=env,
        )

    jobs = [start(0), start(1, TMPDIR="/no/such/folder")]  # the second is not fit, as its checks find
    support.wait_until(lambda: all((tmp_path / f"up-{rank}").exists() for rank in range(4)), 20)
    jobs += [start(node) for node in (2, 3, 4)]
    support.wait_until(lambda: all("is a spare" in job.stderr for job in jobs[2:]), 20)
    (tmp_path / "go").touch()
    assert [job.wait(60).status for job in jobs] == [93] * 5, jobs[0].stderr

    (run_dir,) = Path(program.dir).glob("logs-0/*")
    told = events(program.dir)
    steps = [
        (event["attempt"], event["attrs"]["step"], event["attrs"]["why"])
        for event in told
        if event["name"] == "ladder_step"
    ]
    assert [step[:2] for step in steps] == [
        (0, "restart-in-place"),
        (1, "reattempt"),
        (2, "stop-time-checks"),
        (2, "exclude"),
        (3, "exclude"),
        (3, "evict"),
        (4, "rollback"),
        (5, "replay"),
        (5, "exclude"),
        (6, "restart-in-place"),
        (7, "give-up"),
    ]
    whys = [why for _, step, why in steps if step == "exclude"]
    assert "n1 is left out" in whys[0] and "space /no/such/folder" in whys[0]
    assert "n2 is left out" in whys[1] and "uncorrectable memory error" in whys[1]
    assert "n3 is left out" in whys[2] and "a group replay has found it" in whys[2]
    assert steps[-1][2].startswith("KeyError at ")

    # Ranks are forked, and a spare takes over each time.
    how = {event["attrs"]["how"] for event in told if event["name"] == "rank_started" and event["attempt"] == 1}
    assert how == {"fork"}
    ran = {(event["attempt"], event["node"]) for event in told if event["name"] == "rank_started"}
    others = [1, 1, 1, 2, 3, 3, 4, 4]
    assert ran == {(attempt, f"n{node}") for attempt, other in enumerate(others) for node in (0, other)}

    # What was done, and how long it took: on the nodes that did it.
    ends = [event for event in told if event["kind"] == "end"]
    checks = {event["node"]: event["attrs"]["failed"] for event in ends if event["name"] == "stop_checks"}
    assert set(checks) == {f"n{node}" for node in range(5)} and checks["n1"] > checks["n0"]
    hooks = [
        (event["attempt"], event["node"], event["name"], event["attrs"]["status"])
        for event in ends
        if event["name"] in ("rollback", "replay", "post_mortem")
    ]
    assert sorted(hooks) == sorted(
        [(4, "n0", "rollback", 0), (5, "n0", "replay", 0)]
        + [(attempt, f"n{other}", "post_mortem", 0) for attempt, other in enumerate(others)]
    )
    (mortem,) = Path(program.dir).glob("logs-2/*/post-mortem-3.log")
    assert mortem.read_text().split("\n")[:2] == ["T", "rank 3"], "the other rank is held, and alive"
    assert (run_dir / "rollback-4.log").read_text() == 'class": "numeric\nrolled back for numeric\n'
    assert (run_dir / "hosts-5.txt").read_text() == "n0\nn3\n"

    pages = {number: json.loads((run_dir / f"failure-{number}.json").read_text()) for number in range(8)}
    assert [page["step"] for page in pages.values()] == [
        *("restart-in-place", "reattempt", "stop-time-checks", "evict"),
        *("rollback", "replay", "restart-in-place", "give-up"),
    ]
    for number, stage in ((2, "checks_s"), (4, "rollback_s"), (5, "replay_s")):
        assert 0.01 < pages[number]["stages"][stage] < 20
        assert {"checks_s", "rollback_s", "replay_s"} & set(pages[number]["stages"]) == {stage}
    assert all(page["stages"]["post_mortem_s"] > 0.001 for page in pages.values())
    text = (run_dir / "failure-4.txt").read_text()
    assert "done       restart 5 of 20 (--max-restarts)\n           rollback: 5 failures in a row\n" in text
    assert "           rollback on n0: it succeeded after " in text and "\n  rollback " in text


def test_a_post_mortem_that_hangs_costs_its_time(bootrun: support.Programs, script: Callable[..., str]) -> None:
    """Nothing of it is left, which the leak check sees."""
    run = bootrun(
        *("--standalone", "--nproc-per-node", 2, "--post-mortem", "sleep 600 & setsid sleep 600"),
        *("--post-mortem-timeout", 0.3, "--log-dir", "/dev/null"),
        script("import os, time\nos.environ['RANK'] == '1' or time.sleep(600)\nraise SystemExit(3)"),
    )
    assert run.status == 1
    assert "post-mortem: it was stopped, as it took longer than 0.3 s after 0." in run.stderr
    assert run.seconds < 10


def shown(pid: int) -> str:
    """What `bootseer status` says."""
    done = subprocess.run([f"{support.SCRIPTS}/bootseer", "status", str(pid)], capture_output=True, text=True)
    return done.stdout


def test_a_signal_ends_a_step_and_the_job(bootrun: support.Programs, script: Callable[..., str]) -> None:
    job = bootrun.start(
        *("--standalone", "--max-restarts", 3, "--rollback-command", "touch began; sleep 600"),
        script("raise RuntimeError('loss is nan')"),
    )
    support.wait_until(lambda: os.path.exists(f"{job.dir}/began"))
    support.wait_until(lambda: "escalation ladder: rollback" in shown(job.pid))
    job.signal(signal.SIGTERM)
    assert job.wait(20).status == 143


def test_a_killed_bootrun_leaves_neither_held_ranks_nor_the_command(
    bootrun: support.Programs, script: Callable[..., str]
) -> None:
    """As the leak check sees."""
    job = bootrun.start(
        *("--standalone", "--nproc-per-node", 2, "--post-mortem", "echo $BOOTSEER_RANK_PIDS > began; sleep 600"),
        script("import os, time\nos.environ['RANK'] == '1' or time.sleep(600)\nraise SystemExit(3)"),
    )
    began = Path(job.dir) / "began"
    support.wait_until(lambda: began.exists() and began.read_text().endswith("\n"))
    held = int(began.read_text().partition(":")[2])
    assert support.is_running(held)
    job.signal(signal.SIGKILL)
    job.wait()
    support.wait_until(lambda: not support.is_running(held))
