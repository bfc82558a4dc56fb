"""The exits of a node's ranks as facts: what a rank had failed of before it was told to stop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

import pytest

from launcher.in_rank import bootstrap as inside
from launcher.ranks.failure_class import FailureClass, certain_user_error, classify_failure
from launcher.ranks.group import GroupEvents, Rank, RankGroup, describe_exec_error
from launcher.ranks.output.logs import RankLogs
from launcher.ranks.stats_page import StatsPageFile
from launcher.rendezvous.messages import Failure, World
from launcher.spec import LaunchSpec
from launcher.supervisor.client import Exited, SupervisorClient

WORLD = World(0, 0, 0, 1, 0, 2, 0, 2, "localhost", 1234)
ERROR = """{"message": {"message": "%s", "extraInfo": {"py_callstack": "%s", "timestamp": "1"}}}"""
RAISED = "RuntimeError: CUDA error: an illegal memory access was encountered"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.1]:8929"


class Supervisor:
    """Takes orders."""

    def stop(self, signum: int, grace_s: float) -> None:
        pass

    def hasten(self, grace_s: float) -> None:
        pass


class Node:
    """Two ranks that run."""

    def __init__(self, folder: Path) -> None:
        self.told: list[Failure] = []
        self.files = [folder / f"error-{number}.json" for number in range(2)]
        self.pages = [folder / f"page-{number}" for number in range(2)]
        pages = [StatsPageFile(str(path), "") for path in self.pages]
        logs = [RankLogs(None, None, False, False, str(path)) for path in self.files]
        events = GroupEvents(*(lambda *_: None for _ in range(5)))._replace(failed=self.told.append)
        self.group = RankGroup(
            cast(LaunchSpec, None),
            WORLD,
            "node0",
            cast(SupervisorClient, Supervisor()),
            lambda ns: (ns, 0),
            events,
            [Rank(number, number, logs[number], "", page=pages[number]) for number in range(2)],
        )
        for key in range(2):
            self.group.on_spawned(key, 100 + key, 1)

    def fails(self, number: int, said: str) -> None:
        self.files[number].write_text(ERROR % (said, said))

    def leaves(self, number: int, status: int) -> None:
        """Its script has called sys.exit."""
        page = bytearray(inside.PAGE_HEAD.ljust(inside.PAGE_BYTES, b"\0"))
        page[inside.END_AT] = status
        self.pages[number].write_bytes(page)

    def exits(self, number: int, status: int) -> Failure:
        self.group.on_exited(Exited(number, 100 + number, status, 1 << 62, 0.0, 0.0, 0))
        return self.group.failures[-1]


@pytest.mark.parametrize("asked", [1, 2])
def test_a_rank_that_had_failed_when_it_was_stopped_is_no_victim_of_that(tmp_path: Path, asked: int) -> None:
    node = Node(tmp_path)
    node.fails(1, RAISED)  # and is slow to end
    for _ in range(asked):
        node.group.stop(15, 30.0)
    failure = node.exits(1, -15)
    assert (failure.stopped_by_us, failure.message) == (False, RAISED)
    assert node.told == [failure]
    assert classify_failure(failure).kind is FailureClass.ACCELERATOR


def test_what_a_signal_makes_a_rank_say_is_nothing(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.group.stop(15, 30.0)
    node.fails(1, RAISED)
    node.group.stop(15, 2.0)
    failure = node.exits(1, 1)
    assert (failure.stopped_by_us, failure.message) == (True, "")
    assert node.exits(0, -15).stopped_by_us
    assert node.told == []


def test_victims_that_were_stopped_have_nothing_to_say(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.fails(1, CLOSED)
    node.group.stop(15, 30.0)
    failure = node.exits(1, -15)
    assert (failure.stopped_by_us, failure.traceback, failure.error_file) == (True, "", "")


def test_the_class_is_that_of_the_exception_not_of_our_signal(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.fails(0, 'Traceback:\\n  File \\"/job/train.py\\", line 7, in <module>\\nKeyError: 1')
    node.group.stop(15, 30.0)
    failure = node.exits(0, -15)
    verdict = classify_failure(failure)
    assert (verdict.kind, verdict.why) == (FailureClass.USER, "KeyError")
    assert certain_user_error(failure) == "KeyError at /job/train.py:7", (
        "the same error twice is seen all the same"
    )


def test_a_script_that_was_over_when_it_was_stopped_is_no_victim_of_that(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.leaves(1, 3)  # and is slow to end
    node.group.stop(15, 30.0)
    failure = node.exits(1, -15)
    assert (failure.stopped_by_us, failure.status) == (False, 3)
    assert node.told == [failure]
    node.leaves(0, 4)
    assert node.exits(0, -15).stopped_by_us, "what it does when it is told to stop tells nothing"


def test_a_rank_keeps_the_status_that_it_ended_with(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.leaves(1, 3)
    node.group.stop(15, 30.0)
    assert node.exits(1, 5).status == 5, "a handler at its end may have changed it"


@pytest.mark.parametrize(
    ("program", "mode", "text", "message"),
    [
        ("./run.sh", 0o644, "#!/bin/sh\n", "permission denied; make it executable: chmod +x ./run.sh"),
        (
            "run.sh",
            0o755,
            "#!/bin/sh\n",
            "no such file or directory; a program without / is looked for in PATH: write ./run.sh",
        ),
        (
            "./run.sh",
            0o755,
            "#!/no/sh\n",
            "no such file or directory; its first line names an interpreter that does not exist",
        ),
        (
            "./run.sh",
            0o755,
            "echo\n",
            "exec format error; its first line must name an interpreter, such as #!/bin/sh",
        ),
        (
            "./none",
            None,
            "",
            "no such file or directory; give a path relative to this directory, or a program in PATH",
        ),
        ("no-such-program", None, "", "no such file or directory; it is not in PATH"),
        ("./folder", None, "", "permission denied; it is a directory"),
        ("./run.sh/x", 0o755, "", "not a directory"),
    ],
)
def test_a_program_that_cannot_be_executed_is_named_with_the_fix(
    program: str, mode: int | None, text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    if mode is not None:
        (tmp_path / "run.sh").write_text(text)
        (tmp_path / "run.sh").chmod(mode)
    with pytest.raises(OSError) as failed:
        os.execvp(program, [program])
    assert describe_exec_error(program, failed.value.errno or 0) == f"{program}: {message}"
