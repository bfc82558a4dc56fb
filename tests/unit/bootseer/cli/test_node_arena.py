"""A node's arena without bootrun, with a checkpoint service that answers as a test says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bootseer.cli import node_arena
from bootseer.cli.node_arena import NodeArena, run_command
from bootseer.errors import CheckpointError, NotFound

Answers = dict[str, list[dict[str, Any]]]
Start = Callable[[Answers], NodeArena]

# Answers each order; ends after the last one, so that a client that waits for more gets an error.
SERVICE = """
import json, sys
answers = json.loads(sys.argv[1])
while answers:
    for answer in answers.pop(json.loads(sys.stdin.readline())["do"]):
        if "touch" in answer:
            open(answer["touch"], "w").close()
        for _ in range(answer.pop("times", 1)):
            print(json.dumps(answer), flush=True)
"""
RESOLVED = {"did": "resolved", "version": "v", "digest": "d", "bytes": 7, "passed": []}
READY = {"did": "ready", "path": "/p", "address": "/a", "disk_bytes": 0, "taken_bytes": 0}


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Start:
    def start(answers: Answers) -> NodeArena:
        command = [sys.executable, "-c", SERVICE, json.dumps({"start": [], **answers})]
        monkeypatch.setattr(node_arena, "command_of", lambda _module: command)
        return NodeArena("hdfs://n/run")

    return start


def no_progress(_done: int, _all: int) -> None:
    pass


def test_a_loaded_version_is_found_by_variables(start: Start) -> None:
    progress: list[tuple[int, int]] = []
    steps = [{"did": "progress", "bytes": 3, "of_bytes": 7}, {"did": "alive"}, READY]
    with start({"resolve": [RESOLVED], "load": steps}) as arena:
        found = arena.load(lambda done, total: progress.append((done, total)))
    assert (found["BOOTSEER_CHECKPOINT"], found["BOOTSEER_ARENA"]) == ("/p", "/a")
    assert progress == [(3, 7)]


@pytest.mark.parametrize("kind", ["damaged", "away", "refused"])
def test_a_load_that_fails_is_an_error(start: Start, kind: str) -> None:
    failed = {"did": "failed", "why": "unit 17 is damaged", "kind": kind, "digest": "d", "attempt": 0}
    text = r"^hdfs://n/run: cannot be loaded: unit 17 is damaged$"
    with start({"resolve": [RESOLVED], "load": [failed]}) as arena, pytest.raises(CheckpointError, match=text):
        arena.load(no_progress)


def test_a_failure_ends_the_copy_and_the_wait_for_a_job(start: Start) -> None:
    failed = {"did": "failed", "why": "unit 17 is damaged", "kind": "damaged", "digest": "d", "attempt": 0}
    with start({"copy": [failed, failed]}) as arena:
        with pytest.raises(CheckpointError, match="unit 17 is damaged"):
            arena.copy(no_progress)
        with pytest.raises(CheckpointError, match="unit 17 is damaged"):
            arena.is_taken(60.0)


def test_a_job_takes_it(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with start(
        {"copy": [{"did": "copied", "why": ""}, {"did": "said", "text": "a line"}, {"did": "taken"}]}
    ) as arena:
        assert arena.copy(no_progress) == ""
        assert arena.is_taken(60.0)
    assert capfd.readouterr().err == "bootseer: a line\n"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        ({"did": "absent", "why": "no checkpoint", "kind": "none"}, NotFound),
        ({"did": "absent", "why": "no checkpoint", "kind": "unusable"}, CheckpointError),
        ({"did": "unresolved", "why": "no checkpoint"}, CheckpointError),
    ],
)
def test_a_version_that_is_not_found(start: Start, answer: dict[str, Any], error: type[Exception]) -> None:
    with start({"resolve": [answer]}) as arena, pytest.raises(error, match=r"^no checkpoint$"):
        arena.resolve()


def test_a_service_that_ends_is_an_error(start: Start) -> None:
    with start({"resolve": []}) as arena, pytest.raises(CheckpointError, match="the checkpoint service has ended"):
        arena.resolve()


def test_messages_do_not_stop_the_service_while_a_program_runs(
    start: Start, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are more than a pipe holds, and the program ends only after the last one."""
    last = str(tmp_path / "last")
    lines = {"did": "said", "text": "x" * 1000, "times": 200}
    failed = {"did": "failed", "why": "unit 17 is damaged", "kind": "damaged", "digest": "d", "attempt": 0}
    with start({"resolve": [RESOLVED], "load": [READY, lines, failed, {"touch": last, "times": 0}]}) as arena:
        arena.load(no_progress)
        arena.follow()
        wait = f"for i in $(seq 2000); do [ -e {last} ] && exit 7; sleep 0.01; done"
        assert run_command(["/bin/sh", "-c", wait], {}) == 7
    told = capfd.readouterr().err.splitlines()
    assert told[:-1] == [f"bootseer: {'x' * 1000}"] * 200
    assert told[-1] == "bootseer: warning: hdfs://n/run: cannot be loaded: unit 17 is damaged"


def test_messages_are_logged_while_memory_is_held(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    with start({"resolve": [{"did": "said", "text": "a line"}]}) as arena:
        arena._ask("resolve")
        with pytest.raises(CheckpointError, match="the checkpoint service has ended"):
            arena.wait()
    assert capfd.readouterr().err == "bootseer: a line\n"
