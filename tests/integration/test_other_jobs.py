"""Two jobs that were given the same endpoint, and spares of one job: neither ends what it is no part of."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from tests import support

Script = Callable[..., str]

WAITS = """
import os, sys, time
open("up-" + os.environ["RANK"], "w").close()
end = time.monotonic() + 60
while not os.path.exists("finish") and time.monotonic() < end: time.sleep(0.01)
"""


def begin(bootrun: support.Programs, port: int, *words: str, nodes: str = "1") -> support.Program:
    where = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--nnodes", nodes)
    return bootrun.start(*where, "--rdzv-conf", "last_call_timeout=0.1", *words)


def end(job: support.Program) -> None:
    with open(os.path.join(job.dir, "finish"), "w", encoding="utf-8"):
        pass
    assert job.wait(20.0).status == 0


@pytest.mark.parametrize(
    ("script_name", "arguments"),
    [("train.py", ("--lr", "2")), ("other.py", ("--lr", "1"))],
    ids=["args", "script"],
)
def test_another_job_at_the_same_endpoint_is_refused_with_both_named(
    bootrun: support.Programs, script: Script, free_port: int, script_name: str, arguments: tuple[str, ...]
) -> None:
    first = begin(bootrun, free_port, script(WAITS, "train.py"), "--lr", "1")
    support.wait_until(lambda: os.path.exists(os.path.join(first.dir, "up-0")))
    run = begin(bootrun, free_port, script(WAITS + "#\n", script_name), *arguments).wait(20.0)
    assert run.status == 1
    [line] = [line for line in run.stderr.splitlines() if "error:" in line]
    assert "train.py --lr 1" in line and f"{script_name} {' '.join(arguments)}" in line
    assert "--rdzv-endpoint" in line
    end(first)


def test_a_spare_that_is_stopped_only_leaves(bootrun: support.Programs, script: Script, free_port: int) -> None:
    first = begin(bootrun, free_port, script(WAITS))
    support.wait_until(lambda: os.path.exists(os.path.join(first.dir, "up-0")))
    spare = begin(bootrun, free_port, script(WAITS))
    support.wait_until(lambda: "this node is a spare" in spare.stderr)
    spare.signal(signal.SIGTERM)
    assert spare.wait(20.0).status == 143
    end(first)
