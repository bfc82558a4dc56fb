"""Heartbeats of real jobs: those that leave an event are in the event files, though ranks write only the first."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.events import Event, read_events
from tests import support

Script = Callable[..., str]

# More heartbeats than are written by the rank itself; from then on its event file cannot be opened by it.
MANY = """
import bootseer, os, sys
ours = sys.modules["_bootseer_rank"]
ours.HEARTBEAT_EVERY_NS = 0
def no_more_events(event, args):
    if event == "open" and str(args[0]).endswith(".jsonl"):
        os._exit(9)
for step in range(ours.FIRST_BEATS):
    bootseer.heartbeat(step, loss=0.5)
sys.addaudithook(no_more_events)
bootseer.heartbeat(100, loss=float("inf"))
bootseer.heartbeat(101)
if sys.argv[1] == "die":
    os.kill(os.getpid(), 9)
elif sys.argv[1] == "wait":
    open(sys.argv[2]).read()  # a pipe, that the test opens when it has seen enough
"""


def heartbeats_of(logs: Path) -> list[list[Event]]:
    """Of each rank."""
    found = [list(read_events(str(path))) for path in sorted(logs.glob("**/rank-*.jsonl"))]
    return [
        [event for event in events if event.name == "heartbeat" and event.value is not None] for events in found
    ]


@pytest.mark.parametrize("end", ["", "die"])
def test_the_last_ones_are_there_however_a_rank_ends(
    bootrun: support.Programs, script: Script, tmp_path: Path, end: str
) -> None:
    logs = tmp_path / "logs"
    ranks = 1 if end else 2  # one that dies has the others ended wherever they are
    run = bootrun("--standalone", "--nproc-per-node", ranks, "--log-dir", logs, script(MANY), end)
    assert (run.status == 0) is not bool(end), run.stderr
    found = heartbeats_of(logs)
    assert len(found) == ranks
    for rank, events in enumerate(found):
        assert [event.value for event in events] == [*range(16), 100, 101]
        assert {(event.rank, event.node, event.run_id) for event in events} == {
            (rank, events[0].node, events[0].run_id)
        }
        assert [event.attrs for event in events[-2:]] == [{"loss": "inf"}, {}]
        times = [event.mono_ns for event in events]
        assert times == sorted(times)


def test_they_come_while_the_ranks_run(bootrun: support.Programs, script: Script, tmp_path: Path) -> None:
    logs, end = tmp_path / "logs", tmp_path / "end"
    os.mkfifo(end)
    job = bootrun.start("--standalone", "--log-dir", logs, script(MANY), "wait", end)

    def have_come() -> bool:
        return [events[-1].value for events in heartbeats_of(logs) if events] == [101]

    support.wait_until(have_come, 30, "the last heartbeats")
    support.wait_until(lambda: "'heartbeat step=100 loss=inf'" in job.stderr, 30, "a rule that reads them")
    end.write_text("")
    assert job.wait(30).status == 0
