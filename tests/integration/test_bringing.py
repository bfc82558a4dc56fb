"""The daemon's talk with the process that brings hot blocks: how that ends, it is told as it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TOP = Path(__file__).parents[2]
# A bringer that does what `fake` does; `order` gives it one. Prints what its daemon knows in the end.
PROGRAM = """
import asyncio, json, os, signal, sys, time
from bootseer.logs import send_to
from bootseer.mounts.tree_daemon import prefetch as bringing
from bootseer.mounts.tree_daemon import prefetch_worker as tree_bringer
from bootseer.mounts.tree_daemon.prefetch_worker import PrefetchFigures, PrefetchOrder
from bootseer.mounts.tree_daemon.settings import Settings

def told(connection, phase):
    tree_bringer._send(connection, PrefetchFigures(prefetch={"phase": phase}, blocks={"requests": 7.0}))

def fake(connection):
    tree_bringer._receive(connection)
    how = sys.argv[1]
    told(connection, "hot")
    if how == "raises":
        raise LookupError("a bug in it")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(go_read, 1)
    told(connection, "done")
    if how == "shown before it has ended":
        os.write(said_write, b"+")
        os.read(go_read, 1)
    return 0

go_read, go_write = os.pipe()
said_read, said_write = os.pipe()
os.set_inheritable(go_read, True)
bringing.tree_worker.main = fake
from bootseer.mounts.tree_daemon import forked
forked.close_others = lambda keep: None
bringing.fork_spare_worker()
pid = bringing._waiting[0].pid
lines = []
send_to(lines.append)

async def run():
    bringer = bringing.PrefetchWorker()
    order = PrefetchOrder(settings=Settings(url="/nowhere"), digest="0" * 64, hot=[], index=b"x")
    task = asyncio.create_task(bringer.run(order))
    while not bringer.fetched.prefetch and not task.done():
        await asyncio.sleep(0.001)
    if sys.argv[1] == "shown before it has ended":
        os.write(go_write, b"+")
        os.read(said_read, 1)
        bringer.note_shown()
        os.write(go_write, b"+")
    elif sys.argv[1] == "shown when it has ended":
        os.write(go_write, b"+")
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        bringer.note_shown()
    await task
    print(json.dumps([bringer.fetched.prefetch, lines]))

asyncio.run(run())
"""


def run(how: str) -> tuple[Any, str]:
    """What the daemon knows, and what was printed as errors."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, how], env={**os.environ, "PYTHONPATH": str(TOP)},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("how", ["shown before it has ended", "shown when it has ended"])
def test_one_that_has_done_all_has_not_failed(how: str) -> None:
    """It is told that the tree is shown when it wants nothing any more."""
    assert run(how)[0] == [{"phase": "done"}, []]


def test_how_it_was_ended_is_reported() -> None:
    (fetched, lines), _ = run("killed")
    assert fetched in ({"phase": "hot"}, {})
    assert len(lines) == 1 and f"it ended with status {-signal.SIGKILL}; " in lines[0]


def test_a_bug_in_it_leaves_a_trace() -> None:
    (_, lines), errors = run("raises")
    assert len(lines) == 1 and "it ended with status 1; " in lines[0]
    assert "LookupError: a bug in it" in errors
