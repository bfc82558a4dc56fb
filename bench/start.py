"""`python -m bench start`: one job from its launch to its first step, with and without Bootseer (root).

The job is real: a Debian as image, an environment with torch, a checkpoint of 0.3 GB, a language model whose
adapters are trained (start_train.py), one rank a node. Nodes and store are network namespaces (start_ways.py):
200 MB/s a node, 400 MB/s out of the store, 5 ms a request. All share the processors of this machine. In each
round all ways take turns; `second` and `restart` follow `cold`, `torchrun_restart` follows `plain`; ratios are
formed within rounds. Techniques alone, most of which take as long as `plain` and of which only single stages
count for a limit, are timed in the first --alone-rounds. What is made of Debian's and pip's packages stays in
--folder for the next run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence

from bench import netns
from bench.ckpt_pages import check_disk
from bench.ckpt_run import make_environ
from bench.image_kept import default_directory
from bench.image_ways import run_bootseer
from bench.record import BenchError, Figures, Target, note
from bench.start_limits import Limits, chain_s, longest_wait
from bench.start_made import Made, prepare
from bench.start_ways import ALONE, RATE_BYTES_PER_S, STORE_BYTES_PER_S, WAYS, Bench, Sample
from bootseer.mounts.tree_daemon.mount import probe_mount

ROUNDS = 3  # of a quarter of an hour each, where three nodes share two processors
ALONE_ROUNDS = 1
MAX_TRIES = 4  # of torchrun's restarts, which do not always come to an end
NODES = (1, 3)
NEEDED_BYTES = 40_000_000_000
TARGETS = {
    "start.first_overhead": Target(at_most=1.1, samples=ROUNDS),
    "start.cold_ratio": Target(at_least=5, samples=ROUNDS),
    "start.cold_tuned_ratio": Target(at_least=1.5, samples=ROUNDS),
    "start.second_ratio": Target(at_least=10, samples=ROUNDS),
    "start.restart_ratio": Target(at_least=10, samples=ROUNDS),
    "start.vs_limit": Target(at_most=1.3, samples=ROUNDS),
    "start.nodes1_vs_limit": Target(at_most=1.3, samples=ROUNDS),
    "start.wait_ms": Target(at_most=50, samples=ROUNDS),
    "start.nodes1_wait_ms": Target(at_most=50, samples=ROUNDS),
}
_RATIOS = {
    "first_overhead": ("first", "plain"),
    "cold_ratio": ("plain", "cold"),
    "cold_tuned_ratio": ("tuned", "cold"),
    "second_ratio": ("plain", "second"),
    "restart_ratio": ("torchrun_restart", "restart"),
}
_GROUPS = (
    ("plain", "torchrun_restart"),
    ("tuned",),
    ("first",),
    ("cold", "second", "restart"),
    ("warmed",),
    *((way,) for way in ALONE),
)
_FROM_NOTHING = ("plain", "tuned", "first")  # the store has no more than those who made image and checkpoint left


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--nodes", type=int, nargs="+", default=list(NODES), help="of a job (default: 1 and 3)")
    parser.add_argument("--way", choices=WAYS, action="append", help="only this one (may be repeated)")
    parser.add_argument(
        "--alone-rounds", type=int, default=ALONE_ROUNDS, help=f"of each technique alone (default: {ALONE_ROUNDS})"
    )
    parser.add_argument("--folder", default="", help="where all lies, on a real disk (default: the cache's)")
    parser.add_argument(
        "--page", default="", help="a page that compares the last first start and the last cold one"
    )


def run(args: argparse.Namespace) -> Figures:
    """Measures and returns the figures."""
    directory = begin(args.folder)
    made = prepare(directory)
    for name, value in made.facts.items():
        note(f"{name}: {value:,.0f}")
    taken: dict[int, dict[str, list[Sample]]] = {}
    for count in args.nodes:
        taken[count] = measure(made, count, args.way or WAYS, (args.rounds, args.alone_rounds), directory)
    if args.page:
        words = [
            "report",
            *(os.path.join(directory, "logs", way) for way in ("first", "cold")),
            "--html",
            args.page,
        ]
        run_bootseer(words, make_environ())
    return to_figures(made, taken)


def begin(directory: str) -> str:
    """Where all lies. From now on SIGTERM takes down what was made. Raises: BenchError where it cannot be made."""
    check_machine()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found = os.path.abspath(directory or os.path.join(os.path.dirname(default_directory()), "start"))
    os.makedirs(found, mode=0o700, exist_ok=True)
    check_disk(found, NEEDED_BYTES)
    return found


def check_machine() -> None:
    """Raises: BenchError where such nodes cannot be made."""
    reason = netns.why_not() or probe_mount()
    if reason:
        raise BenchError(reason)
    missing = [name for name in ("tar", "zstd", "chroot", "setpriv", "pgrep") if shutil.which(name) is None]
    if missing:
        raise BenchError(f"not installed here: {', '.join(missing)}")


def measure(
    made: Made, count: int, ways: Sequence[str], rounds: tuple[int, int], above: str
) -> dict[str, list[Sample]]:
    """All rounds on so many nodes. Args: rounds: of all ways but ALONE, and of these."""
    taken: dict[str, list[Sample]] = {way: [] for way in ways}
    directory = tempfile.mkdtemp(prefix="nodes-", dir=above)
    try:
        with netns.Hosts(count + 1) as hosts:
            netns.shape(hosts.hosts[:count], RATE_BYTES_PER_S, "1mb")
            bench = Bench(made, hosts, count, directory)
            if set(ways).difference(_FROM_NOTHING, ("torchrun_restart",)):
                note(f"{count} nodes: a first job, whose recordings later ones find")
                bench.set_store(known=False)
                bench.run("first", publishes=True)
                bench.keep_store()
            for number in range(rounds[0]):
                groups = _GROUPS if number % 2 == 0 else _GROUPS[::-1]
                for group in groups:
                    if group[0] in ALONE and number >= rounds[1]:
                        continue
                    bench.clear()
                    for way in group:
                        # What the others of a group need is made all the same.
                        if way in ways or (way == group[0] and set(group) & set(ways)):
                            bench.set_store(known=group[0] not in _FROM_NOTHING)
                            sample = run_until_it_ends(bench, way)
                            if way in ("first", "cold"):
                                bench.keep_logs(os.path.join(above, "logs", way))
                            note(f"{count} nodes, round {number + 1} of {rounds[0]}: {way} {describe(sample)}")
                            if way in ways:
                                taken[way].append(sample)
                check_same({way: samples[-1] for way, samples in taken.items() if samples})
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return taken


def run_until_it_ends(bench: Bench, way: str) -> Sample:
    """One start; of torchrun's restarts one that comes to an end, the others are counted. Raises: BenchError."""
    for number in range(MAX_TRIES):
        try:
            return bench.run(way)._replace(tries=number + 1)
        except BenchError as error:
            if way != "torchrun_restart" or number == MAX_TRIES - 1:
                raise
            note(f"{way} did not come to an end: {str(error).strip().splitlines()[0]}")
    raise AssertionError("it returns above")


def describe(sample: Sample) -> str:
    """A line for who watches."""
    stages: dict[str, float] = {}
    for node in sample.stages:
        for name, began_s, ended_s in node:
            stages[name] = max(stages.get(name, 0.0), ended_s - began_s)
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in stages.items())
    return f"{sample.seconds:.2f} s ({parts}; {sample.cpu_s:.1f} CPU s, {sample.sent_bytes / 1e6:.0f} MB)"


def check_same(samples: Mapping[str, Sample]) -> None:
    """All ways have to have trained the same. Raises: BenchError."""
    first: tuple[str, list[float]] | None = None
    for way, sample in samples.items():
        losses = [round(loss, 3) for loss in sorted(sample.losses)]
        if first is None:
            first = way, losses
        elif losses != first[1]:
            raise BenchError(f"{way} and {first[0]} have not trained the same: {losses[:3]}, {first[1][:3]}")


# ---- figures -------------------------------------------------------------------------------------------------


def to_figures(made: Made, taken: Mapping[int, Mapping[str, Sequence[Sample]]]) -> Figures:
    """Ratios first, of several nodes without their number; then what they are made of."""
    figures = Figures()
    for count in sorted(taken, reverse=True):
        ways = {way: [sample.seconds for sample in samples] for way, samples in taken[count].items() if samples}
        prefix = "start." if count == NODES[-1] else f"start.nodes{count}_"
        for name, (above, below) in _RATIOS.items():
            if above in ways and below in ways:
                figures.add_ratio(f"{prefix}{name}", ways[above], ways[below])
        add_limits(figures, prefix, count, taken[count])
    for count, by_way in taken.items():
        for way, samples in by_way.items():
            if not samples:
                continue
            name = f"start.nodes{count}_{way}"
            figures.add(f"{name}_s", "s", [each.seconds for each in samples])
            figures.add(f"{name}_cpu_s", "CPU s", [each.cpu_s for each in samples])
            figures.add(f"{name}_mb", "MB out of the store", [each.sent_bytes / 1e6 for each in samples])
            figures.add(f"{name}_requests", "requests", [each.requests for each in samples])
            figures.add(
                f"{name}_spread_s",
                "s between the first and the last node",
                [
                    max(n["first_step"] for n in each.nodes) - min(n["first_step"] for n in each.nodes)
                    for each in samples
                ],
            )
            for stage in sorted({name for each in samples for node in each.stages for name, _, _ in node}):
                figures.add(
                    f"{name}_{stage}_s", "s on the slowest node", [longest(each, stage) for each in samples]
                )
            figures.add(f"{name}_step_ms", "ms a step", [each.step_s * 1e3 for each in samples])
            if way == "torchrun_restart":
                figures.add(f"{name}_tries", "restarts until one came to an end", [each.tries for each in samples])
    for name, value in made.facts.items():
        figures.add(f"start.{name}", "bytes" if name.endswith("bytes") else "files", [value])
    figures.add("start.packages", "packages", [len(made.packages)])
    return figures


def add_limits(figures: Figures, prefix: str, count: int, taken: Mapping[str, Sequence[Sample]]) -> None:
    """How near cold starts come to what is possible, and whether one of their stages has waited."""
    cold = taken.get("cold", ())
    if cold:
        waits = [max(map(longest_wait, sample.stages)) for sample in cold]
        figures.add(f"{prefix}wait_ms", "ms", [wait.seconds * 1e3 for wait in waits])
        note(f"{count} nodes: longest wait of a stage: {max(waits).stage}, {max(waits).seconds * 1e3:.0f} ms")
    if not all(taken.get(way) for way in ("cold", *ALONE)):
        return
    limits = [limits_of(sample, *(taken[way] for way in ALONE)) for sample in cold]
    for name in Limits._fields:
        figures.add(f"{prefix}limit_{name}_s", "s", [float(getattr(each, name)) for each in limits])
    bound = [each.binding() for each in limits]
    figures.add_ratio(f"{prefix}vs_limit", [sample.seconds for sample in cold], [value for _, value in bound])
    note(f"{count} nodes: what binds a cold start: {', '.join(f'{name} {value:.2f} s' for name, value in bound)}")


def limits_of(
    cold: Sample,
    image: Sequence[Sample],
    env: Sequence[Sample],
    checkpoint: Sequence[Sample],
    ranks: Sequence[Sample],
) -> Limits:
    """Of a cold start. Args: image, env, checkpoint, ranks: starts by each technique alone; medians count."""

    def alone_s(samples: Sequence[Sample], stage: str) -> float:
        return statistics.median(longest(sample, stage) for sample in samples)

    return Limits(
        chain=chain_s(
            image_s=alone_s(image, "image"),
            env_s=alone_s(env, "setup"),
            checkpoint_s=alone_s(checkpoint, "checkpoint"),
            preload_s=alone_s(ranks, "preload"),
            rest_s=statistics.median(sample.seconds - spawned_s(sample) for sample in ranks),
        ),
        cpu=cold.cpu_s / (os.cpu_count() or 1),
        link=max(cold.node_bytes) / RATE_BYTES_PER_S,
        store=cold.sent_bytes / STORE_BYTES_PER_S,
    )


def spawned_s(sample: Sample) -> float:
    """When the last node had started its ranks."""
    return max(ended_s for node in sample.stages for name, _, ended_s in node if name == "spawn")


def longest(sample: Sample, stage: str) -> float:
    """Seconds of a stage on the slowest node."""
    return max(
        (ended_s - began_s for node in sample.stages for name, began_s, ended_s in node if name == stage),
        default=0.0,
    )
