"""What tracing of collectives costs, and whether the first stuck rank of hangs over process groups is named.

Cost: CPU time of a thread for dist.all_reduce, alone in its group with gloo, with the tracer less without it: in
processes of their own, one after the other. Hangs: each cause of trace_jobs.py in a real job of 4 ranks under
bootrun --trace-collectives; what its report says first is compared with what was planted. --cost-only leaves
them out.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import signal
import subprocess
import sys
import tempfile
import time

from bench.record import BenchError, Figures, Target
from bench.trace_jobs import AT_STEP, CAUSES, JOB
from launcher.supervise.page import Pages
from launcher.supervise.ring import NEW_RING, read_ring

ROUNDS = 5
CALLS = 20_000
REPORT_S = 120.0
TARGETS = {
    "faults.tracing_us": Target(at_most=10.0),
    "trace.named_share": Target(at_least=1.0),
}
COST = """
import sys, time
from launcher import inside
page = inside.open_page(sys.argv[1])
inside.FirstStep(inside.Events("", "run", "node", 0, 0), page).install()
import torch
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
tensor, calls = torch.ones(4, 3), int(sys.argv[2])
def measure():
    best = 1e9
    for _ in range(5):
        began_s = time.thread_time()
        for _ in range(calls):
            dist.all_reduce(tensor)
        best = min(best, time.thread_time() - began_s)
    return best / calls * 1e6
print(measure())
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--cost-only."""
    parser.add_argument("--cost-only", action="store_true", help="no jobs that hang")


def run(args: argparse.Namespace) -> Figures:
    """`args.rounds` rounds of the cost; each hang once."""
    figures = Figures()
    costs = []
    for _ in range(args.rounds):
        plain_us, traced_us = _cost(b""), _cost(NEW_RING)
        costs.append(traced_us - plain_us)
    figures.add("faults.tracing_us", "us", costs)
    if not args.cost_only:
        named = [_is_named(name) for name in CAUSES]
        figures.add("trace.named_share", "ratio", [sum(named) / len(named)])
    return figures


def _cost(ring: bytes) -> float:
    pages = Pages()
    try:
        page = pages.renew(1, False, ring)[0]
        environ = {**os.environ, "OMP_NUM_THREADS": "1"}
        ran = subprocess.run(
            [sys.executable, "-c", COST, page.given, str(CALLS)], capture_output=True, text=True, env=environ
        )
        if ran.returncode:
            raise BenchError(f"the rank failed: {ran.stderr}")
        found = read_ring(page.path, 0)
        if bool(ring) != bool(found is not None and found.calls):
            raise BenchError("the tracer did not do what was measured")
        return float(ran.stdout)
    finally:
        pages.close()


def _is_named(name: str) -> bool:
    planted = CAUSES[name]
    with tempfile.TemporaryDirectory(prefix="bench-trace-") as folder:
        with open(f"{folder}/job.py", "w") as file:
            file.write(JOB)
        flags = ["--standalone", "--nproc-per-node", "4", "--hang-least", "2", "--log-dir", f"{folder}/logs"]
        words = [f"{folder}/job.py", name, str(planted.rank), str(AT_STEP)]
        began_s = time.monotonic()
        job = subprocess.Popen(
            [sys.executable, "-m", "launcher", *flags, "--trace-collectives", "--shutdown-timeout", "1", *words],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            record = _wait_for_report(job, folder)
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait()
    causes = record.get("causes") or [{"ranks": [], "kind": "nothing", "sure": "", "line": ""}]
    first = causes[0]
    is_right = first["ranks"] == [planted.rank] and first["kind"] in planted.kinds
    print(
        f"{'right' if is_right else 'WRONG'}  {name:16} rank {planted.rank} {planted.what}\n"
        f"       {first['kind']} {first['ranks']} ({first['sure']}): {first['line']}",
        f"[{time.monotonic() - began_s:.0f} s]",
    )
    return is_right


def _wait_for_report(job: subprocess.Popen[bytes], folder: str) -> dict[str, list[dict[str, object]]]:
    end_s = time.monotonic() + REPORT_S
    while time.monotonic() < end_s and job.poll() is None:
        if glob.glob(f"{folder}/logs/*/standstill-0.txt"):
            (path,) = glob.glob(f"{folder}/logs/*/standstill-0.json")
            with open(path) as file:
                found: dict[str, list[dict[str, object]]] = json.load(file)
            return found
        time.sleep(0.1)
    return {}
