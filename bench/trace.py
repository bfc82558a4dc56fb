"""What tracing of collectives costs, and whether the first stuck rank of hangs over process groups is named.

Cost: CPU time of a thread for a collective, alone in its group with gloo, with the tracer less without it: two
processes in turns (turns.py), on one CPU, as waking gloo's thread on another one costs now 1 us and now 30. Calls
from Python: all_reduce, and one that is waited for later; from C++: a functional all_reduce, as compiled models
have them. What steps of a job become longer, with its 95 % interval.
Hangs: each cause of trace_jobs.py in a real job of 4 ranks under bootrun --trace-collectives; what its report says
first is compared with what was planted. --cost-only leaves them out, --cause all but these, and the cost.
--backend nccl is for one GPU, or four, and leaves out what steps become longer.
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
from pathlib import Path

from bench.record import BenchError, Figures, Target
from bench.trace_jobs import AT_STEP, CAUSES, JOB, NCCL_AT_STEP, NCCL_CAUSES, Planted
from bench.turns import IN_TURN, measure_pairs, measure_steps
from launcher.in_rank.tracer import SLOTS
from launcher.monitor.collectives.ring import NEW_RING, read_ring
from launcher.ranks.stats_page import StatsPages

ROUNDS = 20
CALLS = 2_000
STEP_JOBS, STEP_TURNS, STEPS = 8, 10, 20
REPORT_S = 120.0
TARGETS = {
    "faults.tracing_us": Target(at_most=10.0),
    "trace.named_share": Target(at_least=1.0),
}
COST = (
    IN_TURN
    + """
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from launcher.in_rank import bootstrap as inside
page = inside.open_page(sys.argv[1])
inside.FirstStep(inside.Events("", "run", "node", 0, 0), page).install()
import torch
import torch.distributed as dist
dist.init_process_group(sys.argv[3], store=dist.HashStore(), rank=0, world_size=1)
device = "cuda:0" if sys.argv[3] == "nccl" else "cpu"
tensor, name = torch.ones(4, 3, device=device), dist.group.WORLD.group_name
functional, wait = torch.ops._c10d_functional.all_reduce_.default, torch.ops._c10d_functional.wait_tensor.default
def python():
    dist.all_reduce(tensor)
def later():
    dist.all_reduce(tensor, async_op=True).wait()
def cpp():
    wait(functional(tensor, "sum", name))
call = {"python": python, "later": later, "cpp": cpp}[sys.argv[2]]
for calls in asked():
    if not calls:
        break
    began_s = time.thread_time()
    for _ in range(calls):
        call()
    took_s = time.thread_time() - began_s
    if device != "cpu":
        torch.cuda.synchronize()
    answer(took_s / calls * 1e6)
"""
)
WAYS = {"faults.tracing_us": "python", "trace.later_us": "later", "trace.from_cpp_us": "cpp"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """--cost-only, --backend, --cause."""
    parser.add_argument("--cost-only", action="store_true", help="no jobs that hang")
    parser.add_argument("--backend", choices=("gloo", "nccl"), default="gloo", help="of torch")
    parser.add_argument("--cause", action="append", choices=list(CAUSES), help="only these; again for more")


def run(args: argparse.Namespace) -> Figures:
    """`args.rounds` rounds of the cost; STEP_JOBS pairs of jobs; each hang once."""
    figures = Figures()
    causes = NCCL_CAUSES if args.backend == "nccl" else CAUSES
    tried = [name for name in causes if name in (args.cause or causes)]
    if not args.cause:
        _add_cost(figures, args.rounds, args.backend)
    if not args.cost_only:
        named = [_is_named(name, causes[name], args.backend) for name in tried]
        figures.add("trace.named_share", "ratio", [sum(named) / len(named)])
    return figures


def _add_cost(figures: Figures, rounds: int, backend: str) -> None:
    for name, way in WAYS.items():
        figures.add(name, "us", _cost(way, rounds, backend))
    if backend == "nccl":
        return
    pairs = measure_steps([], ["--trace-collectives"], STEP_JOBS, STEP_TURNS, STEPS)
    figures.add("trace.step_ms", "ms", [each.plain[0] * 1e3 for each in pairs])
    figures.add("trace.step_added_us", "us", [each.added() * 1e6 for each in pairs])
    figures.add("trace.step_added_cpu_us", "us", [each.added(1) * 1e6 for each in pairs])


def _cost(way: str, rounds: int, backend: str) -> list[float]:
    """CPU microseconds that each call costs more, of each round."""
    pages = [StatsPages(), StatsPages()]
    try:
        made = [each.renew(1, False, ring)[0] for each, ring in zip(pages, (b"", NEW_RING), strict=True)]
        command = [sys.executable, "-c", COST]
        commands = [*command, made[0].given, way, backend], [*command, made[1].given, way, backend]
        with tempfile.TemporaryDirectory(prefix="bench-trace-") as directory:
            environ = {**os.environ, "OMP_NUM_THREADS": "1"}
            pairs = measure_pairs(commands, environ, directory, rounds, CALLS)
        traced = read_ring(made[1].path, 0)
        if read_ring(made[0].path, 0) is not None or traced is None or len(traced.calls) != SLOTS:
            raise BenchError("the tracer did not do what was measured")
        return [each.added() for each in pairs]
    finally:
        for each in pages:
            each.close()


def _is_named(name: str, planted: Planted, backend: str) -> bool:
    with (
        tempfile.TemporaryDirectory(prefix="bench-trace-") as directory,
        open(f"{directory}/said", "w+", errors="replace") as said,
    ):
        with open(f"{directory}/job.py", "w") as file:
            file.write(JOB)
        flags = ["--standalone", "--nproc-per-node", "4", "--hang-least", "2", "--log-dir", f"{directory}/logs"]
        grace = ["--shutdown-timeout", str(planted.grace_s)]
        at_step = NCCL_AT_STEP if backend == "nccl" else AT_STEP
        words = [f"{directory}/job.py", name, str(planted.rank), str(at_step), backend]
        began_s = time.monotonic()
        job = subprocess.Popen(
            [sys.executable, "-m", "launcher", *flags, "--trace-collectives", *grace, *words],
            stdout=subprocess.DEVNULL,
            stderr=said,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            record = _wait_for_report(job, directory, "failure" if planted.ends else "standstill")
        finally:
            job.send_signal(signal.SIGTERM)
            job.wait()
        if not record:
            print(Path(said.name).read_text(errors="replace")[-2000:])
    causes = record.get("causes") or [{"ranks": [], "kind": "nothing", "sure": "", "line": ""}]
    first = causes[0]
    is_right = first["ranks"] == [planted.rank] and first["kind"] in planted.kinds
    print(
        f"{'right' if is_right else 'WRONG'}  {name:16} rank {planted.rank} {planted.what}\n"
        f"       {first['kind']} {first['ranks']} ({first['sure']}): {first['line']}",
        f"[{time.monotonic() - began_s:.0f} s]",
    )
    return is_right


def _wait_for_report(
    job: subprocess.Popen[bytes], directory: str, kind: str
) -> dict[str, list[dict[str, object]]]:
    end_s = time.monotonic() + REPORT_S
    has_ended = False
    while time.monotonic() < end_s and not has_ended:
        has_ended = job.poll() is not None
        if (kind == "standstill" or has_ended) and glob.glob(f"{directory}/logs/*/{kind}-0.txt"):
            (path,) = glob.glob(f"{directory}/logs/*/{kind}-0.json")
            with open(path) as file:
                found: dict[str, list[dict[str, object]]] = json.load(file)
            return found
        time.sleep(0.1)
    return {}
