"""`bootseer report` on a made-up job of 1,000 nodes with 8 ranks each: time, memory, size of the page.

Each round runs the real program in a process of its own, once with the coordinator's run file, once with the files
of all nodes and ranks alone (9,000 of them), each writing JSON, page and trace. The answer to what is slow has to
name what was planted, else the run counts for nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from typing import NamedTuple

from bench.record import BenchError, Figures, Target, note
from bench.report_job import Plan, Planted, write_job

ROUNDS = 5
PLANTED = (Planted("env", 36.0, 17), Planted("import", 12.0, 633, 5))
TARGETS = {
    "report.run_file_s": Target(at_most=5.0),
    "report.node_files_s": Target(at_most=5.0),
    "report.peak_mib": Target(at_most=1024.0),
    "report.page_mb": Target(at_most=4.0),
}


class Sample(NamedTuple):
    """One run of the program."""

    seconds: float
    peak_mib: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How large the job is."""
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=8, help="a node")


def run(args: argparse.Namespace) -> Figures:
    """Measures."""
    if args.nodes < 700 or args.ranks < 6:
        raise BenchError("--nodes must be at least 700 and --ranks at least 6: stragglers are planted there")
    plan = Plan(nodes=args.nodes, ranks=args.ranks, planted=PLANTED, run_id="bench")
    samples: dict[str, list[Sample]] = {"run_file": [], "node_files": []}
    pages: list[float] = []
    with tempfile.TemporaryDirectory(prefix="bench-report-") as directory:
        jobs = {
            name: write_job(
                os.path.join(directory, name), plan, run_file=name == "run_file", own_files=name != "run_file"
            )
            for name in samples
        }
        for number in range(args.rounds):
            for name, job in jobs.items():
                samples[name].append(_report(job, directory))
                pages.append(os.path.getsize(os.path.join(directory, "page.html")) / 1e6)
                _check(os.path.join(directory, "report.json"), plan)
            note(
                f"round {number + 1} of {args.rounds}: "
                + ", ".join(f"{samples[n][-1].seconds:.2f} s" for n in jobs)
            )
    figures = Figures()
    for name, own in samples.items():
        figures.add(f"report.{name}_s", "s", [sample.seconds for sample in own])
    figures.add("report.peak_mib", "MiB", [sample.peak_mib for own in samples.values() for sample in own])
    figures.add("report.page_mb", "MB", pages)
    return figures


def _report(job: str, directory: str) -> Sample:
    program = os.path.join(sysconfig.get_path("scripts"), "bootseer")
    files = [
        f"--{name}={os.path.join(directory, file)}"
        for name, file in (("html", "page.html"), ("trace", "trace.json"))
    ]
    argv = [
        sys.executable,
        program,
        "report",
        job,
        "--json",
        "--out",
        os.path.join(directory, "report.json"),
        *files,
    ]
    began_s = time.perf_counter()
    process = subprocess.Popen(argv)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began_s
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchError(f"bootseer report ended with status {process.returncode}")
    return Sample(seconds, usage.ru_maxrss / 1024)


def _check(path: str, plan: Plan) -> None:
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    found = {(each["stage"], node, *ranks) for each in report["stragglers"] for node, ranks in each["places"]}
    expected = {
        (each.stage, plan.name.format(each.node))
        if each.local_rank is None
        else (each.stage, plan.name.format(each.node), each.node * plan.ranks + each.local_rank)
        for each in plan.planted
    }
    is_whole = report["ranks"] == plan.nodes * plan.ranks and report["first_step_s"] is not None
    if found != expected or not is_whole:
        raise BenchError(f"the report names {sorted(found)}, planted was {sorted(expected)}")
