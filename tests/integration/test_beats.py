"""Heartbeats of real jobs: those that leave an event are in the event files, though ranks write only the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from bootseer.events import Event, read_events
from tests import support

Script = Callable[..., str]

# More heartbeats than are written by the rank itself; from then on its event file cannot be opened by it.
MANY = """
import bootseer, os, sys, time
from launcher.inside import FIRST_BEATS
def no_more_events(event, args):
    if event == "open" and str(args[0]).endswith(".jsonl"):
        os._exit(9)
for step in range(FIRST_BEATS):
    bootseer.heartbeat(step, loss=0.5)
sys.addaudithook(no_more_events)
time.sleep(1.1)
bootseer.heartbeat(100, loss=float("inf"))
bootseer.heartbeat(101)
if sys.argv[1] == "die":
    os.kill(os.getpid(), 9)
elif sys.argv[1] == "wait":
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.02)
"""


def beats_of(logs: Path) -> list[list[Event]]:
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
    found = beats_of(logs)
    assert len(found) == ranks
    for rank, events in enumerate(found):
        assert [event.value for event in events] == [*range(16), 100]
        assert {(event.rank, event.node, event.run_id) for event in events} == {
            (rank, events[0].node, events[0].run_id)
        }
        assert events[-1].attrs == {"loss": "inf"}
        assert events[-1].mono_ns - events[-2].mono_ns >= 10**9


def test_they_come_while_the_ranks_run(bootrun: support.Programs, script: Script, tmp_path: Path) -> None:
    logs, end = tmp_path / "logs", tmp_path / "end"
    words = ("--standalone", "--nproc-per-node", 2, "--log-dir", logs)
    job = bootrun.start(*words, script(MANY), "wait", end)

    def have_come() -> bool:
        return [events[-1].value for events in beats_of(logs) if events] == [100, 100]

    support.wait_until(have_come, 30, "the last heartbeats")
    end.touch()
    run = job.wait(30)
    assert run.status == 0 and "'heartbeat step=100 loss=inf'" in run.stderr, "rules read it, too"
