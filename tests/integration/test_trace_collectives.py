"""--trace-collectives: real jobs over two process groups hang, and the report names the first stuck rank."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.trace_jobs import AT_STEP, CAUSES, JOB
from tests import support

FLAGS = ("--standalone", "--nproc-per-node", 4, "--hang-least", 2, "--log-dir", "logs", "--trace-collectives")


@pytest.mark.parametrize(
    "name",
    [
        "other-tag",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CAUSES if name != "other-tag"),
    ],
)
def test_the_first_stuck_rank_is_named(bootrun: support.Programs, script: Callable[..., str], name: str) -> None:
    planted = CAUSES[name]
    program = bootrun.start(*FLAGS, script(JOB), name, planted.rank, AT_STEP, env={"OMP_NUM_THREADS": "1"})
    support.wait_until(lambda: list(Path(bootrun.dir).glob("logs/*/standstill-0.txt")), 90, name)
    (path,) = Path(bootrun.dir).glob("logs/*/standstill-0.json")
    record = json.loads(path.read_text())
    first = record["causes"][0]
    assert (first["ranks"], first["kind"] in planted.kinds) == ([planted.rank], True), first
    dp = sorted([planted.rank, planted.rank ^ 1])
    assert {"name": "dp", "number": planted.rank // 2, "ranks": dp} in record["shared"], "by names of groups"
    assert first["victims"] == sorted({0, 1, 2, 3} - {planted.rank})
    lines = path.with_suffix(".txt").read_text().splitlines()
    assert lines[1].startswith(f"root cause ({first['sure']}): ")
    assert program.process.poll() is None, "it is only told"
    program.signal(signal.SIGKILL if name == "stopped" else signal.SIGTERM)
    program.wait(60)
