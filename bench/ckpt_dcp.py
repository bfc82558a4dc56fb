"""`bench ckpt --dcp`: dcp.load of a sharded state, with torch's reader and with ours.

Four ranks save an FSDP state of 1.42 GB with torch's writer; it is loaded by 1, 2 and 4 ranks (gloo, fresh
processes) with each reader, from cold files. A time is from the first rank's begin to the moment at which the
last rank has touched every page of its shards. Both readers' shards are compared to the last bit, those of four
ranks with what was saved.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bench import ckpt_pages
from bench.ckpt_run import Load, load_together, make_environ, order, python, span_s
from bench.record import BenchError, Figures, note

SAVERS = 4
RANKS = (1, 2, 4)
READERS = ("bootseer", "torch")
MB = 1e6


class Job(NamedTuple):
    """What one job of some ranks did."""

    seconds: float
    cpu_s: float  # of all ranks
    size_bytes: int
    digests: list[dict[str, str]]  # by rank


def run_job(
    action: str, path: str, size: str, ranks: int, directory: str, environs: Sequence[Mapping[str, str]] = ()
) -> Job:
    """Runs the ranks; `environs` are variables for each."""
    rendezvous = os.path.join(directory, f"rendezvous-{os.urandom(8).hex()}")
    commands = []
    for rank in range(ranks):
        ours = {"RANK": str(rank), "WORLD_SIZE": str(ranks), "BENCH_RENDEZVOUS": rendezvous}
        more = environs[rank] if environs else {}
        commands.append((python("bench.ckpt_dcp_rank", action, path, size), make_environ(**ours, **more)))
    loads = load_together(commands)
    return Job(span_s(loads), sum(each.cpu_s for each in loads), total_bytes(loads), [e.digests for e in loads])


def total_bytes(loads: Sequence[Load]) -> int:
    """Of all ranks' shards."""
    return sum(each.size_bytes for each in loads)


def measure(directory: str, size: str, rounds: int) -> Figures:
    """All rounds, as figures."""
    path = os.path.join(directory, "sharded.dcp")
    saved = run_job("save", path, size, SAVERS, directory)
    note(f"{SAVERS} ranks saved {saved.size_bytes / MB:.0f} MB in {saved.seconds:.2f} s")
    taken: dict[tuple[str, int], list[Job]] = {(reader, ranks): [] for reader in READERS for ranks in RANKS}
    for number in range(rounds):
        for ranks in order(RANKS, number):
            for reader in order(READERS, number):
                ckpt_pages.make_cold([path])
                taken[reader, ranks].append(run_job(reader, path, size, ranks, directory))
            compare([taken[reader, ranks][-1] for reader in READERS], saved if ranks == SAVERS else None)
        told = ", ".join(f"{reader} {ranks}: {jobs[-1].seconds:.2f} s" for (reader, ranks), jobs in taken.items())
        note(f"round {number + 1} of {rounds}: {told}")
    return to_figures(taken)


def compare(jobs: Sequence[Job], saved: Job | None) -> None:
    """All jobs of so many ranks have to have the same shards."""
    right = jobs[0] if saved is None else saved
    for job in jobs:
        if job.digests != right.digests:
            raise BenchError("the readers of DCP gave different shards, or others than were saved")


def to_figures(taken: Mapping[tuple[str, int], Sequence[Job]]) -> Figures:
    """Ratios first; the one without a number is that of as many ranks as saved it."""
    figures = Figures()

    def seconds(reader: str, ranks: int) -> list[float]:
        return [job.seconds for job in taken[reader, ranks]]

    for ranks in sorted(RANKS, reverse=True):
        name = "ckpt.dcp_ratio" if ranks == SAVERS else f"ckpt.dcp_ratio_{ranks}"
        figures.add_ratio(name, seconds("torch", ranks), seconds("bootseer", ranks))
    for (reader, ranks), jobs in taken.items():
        figures.add(f"ckpt.dcp_{reader}_{ranks}_s", "s", [job.seconds for job in jobs])
        cpu = [job.cpu_s / job.size_bytes * 1e9 for job in jobs]
        figures.add(f"ckpt.dcp_{reader}_{ranks}_cpu_s_per_gb", "CPU s/GB", cpu)
    return figures
