"""Section `start` of `bench gpu`: launch and restart of ranks that compute on a GPU.

A job: the launcher starts; all ranks import torch (and transformers), make their context, join and all-reduce; the
last one kills itself; the next attempt does the same. `start`: from the launcher's start until all ranks of the
first attempt are past the all-reduce on the GPU; `restart`: from the death until all of the next one are.
torchrun, bootrun with --fork-ranks off, and bootrun as it comes, which has to have forked. All ranks are on one
GPU, with gloo; then two of them once with NCCL, which takes them for ranks of two hosts (NCCL_HOSTID).
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from typing import NamedTuple

from bench.fork import check_forked, read_moments
from bench.gpu_section import Section
from bench.launch import HERE, SCRIPTS, SHARING_OFF, Place, make_place
from bench.processes import run_all
from bench.record import BenchError

RANKS, NCCL_RANKS = 4, 2
SCRIPT = "gpu_start_rank.py"
MIN_ROUND_S = 25.0  # less is left: no further round


class Way(NamedTuple):
    """Who launches."""

    program: str
    flags: tuple[str, ...]
    is_forked: bool = False


WAYS = {
    "torchrun": Way("torchrun", ()),
    "exec": Way("bootrun", ("--fork-ranks", "off")),
    "fork": Way("bootrun", (), True),
}
# Without torch, to try the bench: torchrun alone imports it for seconds, and nothing tells `auto` to fork.
TINY = {"exec": WAYS["exec"], "fork": Way("bootrun", ("--fork-ranks", "on", "--preload", "none"), True)}


class Took(NamedTuple):
    """Seconds of one job."""

    start_s: float
    restart_s: float


def measure(section: Section) -> None:
    """Rounds, as many as there is time for."""
    place = make_place(section.folder)
    shutil.copy(os.path.join(HERE, SCRIPT), section.folder)
    is_tiny = section.size == "tiny"
    ways = TINY if is_tiny else WAYS
    modules = ["transformers.models.gpt2.modeling_gpt2"] if section.size == "full" else []
    if not is_tiny:
        warm_up(modules, section.device)
    ranks = RANKS if section.size == "full" else 2
    job = [section.device, "gloo", *modules] if not is_tiny else ["none", "none"]
    took_s = 0.0
    for number in range(1 if is_tiny else section.rounds):
        if number and section.left_s() < max(MIN_ROUND_S, took_s):
            section.say(f"no time for round {number + 1}")
            break
        began_s = time.monotonic()
        run_round(section, place, number, ways, ranks, job, "")
        took_s = time.monotonic() - began_s
    if section.has_gpu and section.left_s() > MIN_ROUND_S:
        run_round(section, place, 0, ways, NCCL_RANKS, [section.device, "nccl", *modules], "nccl_")


def warm_up(modules: list[str], device: str) -> None:
    """What is imported, and the driver's files, from the disk: the first job is not to pay for all others."""
    names = ", ".join(["torch", "torch.distributed", *modules])
    text = f"import {names}\ntorch.ones(1, device={device!r}).sum().item()"
    subprocess.run([sys.executable, "-c", text], check=True, stdout=sys.stderr)


def run_round(
    section: Section, place: Place, number: int, ways: dict[str, Way], ranks: int, job: list[str], prefix: str
) -> None:
    """Each way once, in an order that rotates."""
    names = list(ways)
    turn = number % len(names)
    took: dict[str, Took] = {}
    for name in names[turn:] + names[:turn]:
        took[name] = run_job(ways[name], place, ranks, job)
        section.sample(f"{prefix}start_{name}_s", "s", took[name].start_s)
        section.sample(f"{prefix}restart_{name}_s", "s", took[name].restart_s)
    for name in ("exec", "fork"):
        if "torchrun" not in took:
            continue
        ending = "" if name == "fork" else f"_{name}"
        section.sample(f"{prefix}start_ratio{ending}", "ratio", took["torchrun"].start_s / took[name].start_s)
        section.sample(
            f"{prefix}restart_ratio{ending}", "ratio", took["torchrun"].restart_s / took[name].restart_s
        )


def run_job(way: Way, place: Place, ranks: int, job: list[str]) -> Took:
    """A job whose last rank dies once."""
    directory = place.fresh()
    logs = os.path.join(directory, "logs")
    command = [os.path.join(SCRIPTS, way.program), "--standalone", "--nproc-per-node", str(ranks), *way.flags]
    command += ["--local-addr", "127.0.0.1"]  # where there is no network names may not be found
    command += ["--max-restarts", "1", "--log-dir", logs, place.script(SCRIPT), directory, *job]
    # The moment of death has no fixed relation to the moments at which a launcher looks.
    environ = {**place.environ, SHARING_OFF: "1", "BENCH_SETTLE_S": str(random.uniform(0.3, 0.5))}
    environ["GLOO_SOCKET_IFNAME"] = "lo"
    (ended,) = run_all([command], environ, place.folder, 120.0)
    if way.is_forked:
        check_forked(logs, ended.output, 2 * ranks)
    first_ns = max(past_ns for past_ns, _ in read_moments(directory, "past-0", ranks))
    again_ns = max(past_ns for past_ns, _ in read_moments(directory, "past-1", ranks))
    with open(os.path.join(directory, "death"), encoding="ascii") as file:
        death_ns = int(file.read())
    if not ended.began_ns < first_ns < death_ns < again_ns:
        raise BenchError(f"out of order: {ended.began_ns}, {first_ns}, {death_ns}, {again_ns}")
    shutil.rmtree(directory)
    return Took((first_ns - ended.began_ns) / 1e9, (again_ns - death_ns) / 1e9)
