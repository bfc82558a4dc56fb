"""--trace-collectives: real jobs over two process groups hang, and the report names the first stuck rank."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.trace_jobs import CAUSES, JOB
from tests import support

FLAGS = ("--standalone", "--nproc-per-node", 4, "--hang-least", 2, "--log-dir", "logs", "--trace-collectives")
AT_STEP = 100  # sooner than in the bench


@pytest.mark.parametrize(
    "name",
    [
        "other-tag",
        *(pytest.param(name, marks=pytest.mark.slow) for name in CAUSES if name != "other-tag"),
    ],
)
def test_the_first_stuck_rank_is_named(bootrun: support.Programs, script: Callable[..., str], name: str) -> None:
    planted = CAUSES[name]
    program = bootrun.start(*FLAGS, script(JOB), name, planted.rank, AT_STEP, "gloo", env={"OMP_NUM_THREADS": "1"})
    kind = "failure" if planted.ends else "standstill"
    if planted.ends:
        assert program.wait(90).status == 1
    support.wait_until(lambda: list(Path(bootrun.dir).glob(f"logs/*/{kind}-0.txt")), 90, name)
    (path,) = Path(bootrun.dir).glob(f"logs/*/{kind}-0.json")
    record = json.loads(path.read_text())
    first = record["causes"][0]
    assert (first["ranks"], first["kind"] in planted.kinds) == ([planted.rank], True), first
    if planted.ends:
        assert f"  root cause ({first['sure']}): rank {planted.rank} " in path.with_suffix(".txt").read_text()
        return
    dp = sorted([planted.rank, planted.rank ^ 1])
    assert {"name": "dp", "number": planted.rank // 2, "ranks": dp} in record["shared"], "by names of groups"
    assert first["victims"] == sorted({0, 1, 2, 3} - {planted.rank})
    lines = path.with_suffix(".txt").read_text().splitlines()
    assert lines[1].startswith(f"root cause ({first['sure']}): ")
    assert program.process.poll() is None, "it is only told"
    program.signal(signal.SIGKILL if name == "stopped" else signal.SIGTERM)
    program.wait(60)


DUMPS = """
import os, sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, dumped = dist.get_rank(), threading.Event()
def dump():
    dumped.wait()
    time.sleep(0.3)  # the others are in the next call
    with open(os.environ["TORCH_FR_DUMP_TEMP_FILE"] + str(rank), "wb") as file:
        file.write(torch._C._distributed_c10d._dump_fr_trace())
threading.Thread(target=dump, daemon=True).start()
for step in range(200):
    if step == 150:
        dumped.set()
        if rank == 1:
            time.sleep(1000)
    dist.all_reduce(torch.ones(8))
    sys.modules["_bootseer_rank"].heartbeat(step, {})
    time.sleep(0.005)
"""


def test_dumps_of_the_flight_recorder_name_the_rank_too(
    bootrun: support.Programs, script: Callable[..., str]
) -> None:
    """Of the real one, without a tracer of ours."""
    prefix = f"{bootrun.dir}/dump_"
    environ = {"OMP_NUM_THREADS": "1", "TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_DUMP_TEMP_FILE": prefix}
    flags = ("--standalone", "--nproc-per-node", 2, "--hang-least", 2, "--log-dir", "logs")
    program = bootrun.start(*flags, script(DUMPS), env=environ)
    support.wait_until(lambda: list(Path(bootrun.dir).glob("logs/*/standstill-0.txt")), 90, "the report")
    (path,) = Path(bootrun.dir).glob("logs/*/standstill-0.json")
    first = json.loads(path.read_text())["causes"][0]
    assert (first["kind"], first["ranks"], first["victims"]) == ("did-not-enter", [1], [0]), first
    program.signal(signal.SIGTERM)
    program.wait(60)


LOCKED = """
import sys, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
lock = threading.Lock()
lock.acquire()
def wait_for_lock():
    lock.acquire()
for step in range(2000):
    if step == 60 and dist.get_rank() == 1:
        wait_for_lock()
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.01)
"""


def test_without_the_tracer_a_rank_that_is_not_in_backward_is_a_guess(
    bootrun: support.Programs, script: Callable[..., str]
) -> None:
    flags = ("--standalone", "--nproc-per-node", 2, "--hang-least", 2, "--log-dir", "logs")
    program = bootrun.start(*flags, script(LOCKED), env={"OMP_NUM_THREADS": "1"})
    support.wait_until(lambda: list(Path(bootrun.dir).glob("logs/*/failure-0.txt")), 90, "the record")
    (path,) = Path(bootrun.dir).glob("logs/*/failure-0.json")
    record = json.loads(path.read_text())
    assert (record["rank"], record["culprit_sure"]) == (1, "guess"), record
    assert "rank 0 is in backward, called at " in record["message"], record["message"]
    assert "rank 1 is in wait_for_lock (" in record["message"], record["message"]
    (report,) = Path(bootrun.dir).glob("logs/*/standstill-0.txt")
    assert report.read_text().splitlines()[-1].startswith("rerun with --trace-collectives")
    program.signal(signal.SIGTERM)
    program.wait(60)
