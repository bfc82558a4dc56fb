"""`python -m bench NAME [args] [--rounds N] [--json FILE]` and `python -m bench check [FILE]`.

A bench is a module with `add_arguments(parser)` and `run(args) -> Figures`, and if it likes `ROUNDS` (default
of --rounds) and `TARGETS` (figure name -> Target, what `check` holds the figures against), or `targets_for(argv)`
where they depend on its arguments.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from bench.check import check_file
from bench.numbers import format_documents
from bench.picture import draw_documents
from bench.record import BenchError, Figures, Target, make_document, write_document
from bench.stale import check_recorded

BENCHES = {
    "launch": "start and restart of a job: torchrun, bootrun and a five-line stdlib launcher",
    "rendezvous": "thousands of simulated nodes at one coordinator",
    "kill": "SIGKILL of bootrun, its guard and both at random moments: what is left",
    "kill_restart": "SIGKILL of agents, guards, coordinator, preloaded process in restarts: goes on, or says why",
    "hang_healthy": "the hang detector on a virtual clock: false alarms in healthy jobs, delay of injected hangs",
    "hosts": "two hosts: one killed, cut off, or with another clock (root)",
    "env_key": "does the key of an environment follow its inputs: pip, uv, poetry, pdm ...; what watching costs",
    "faults": "faults in a real job of two nodes: who is blamed, how soon, beside torchrun; healthy jobs (root)",
    "fork": "forked ranks: start, restart and memory against torchrun, exec and the floor (best as root)",
    "fork_fallbacks": "ranks that were to be forked and are exec'd: each cause, what is printed, that the job ran",
    "gpu": "a machine with a GPU: start, restart, first compiled step, checkpoint, checks, hangs (bench/gpu.sh)",
    "guard": "this code against an earlier commit's: launch, restart, environment, rendezvous (best as root)",
    "restarts": "hundreds of restarts of a job with forked ranks: what grows",
    "ckpt": "loading of checkpoints: disk, HTTP, HDFS and DCP, against other loaders (best as root)",
    "image": "starts of images: disk, layers, our packs in full, lazy, with a recording (root)",
    "env": "an environment on a node that has none: pip, uv, copies, restored by unpack and mount (best as root)",
    "compile": "first steps of compiled models: cold, with restored caches, after a crash; what may not be loaded",
    "peers": "six nodes start at once, with and without each other's help; one lying, slow, killed (root)",
    "report": "a report on 1,000 nodes with 8 ranks each: time, memory, size of the page",
    "pressure": "do ranks wait when their output is under pressure (root)",
    "serve": "bootseer serve beside a job: CPU, memory, steps of ranks; 500 open pages",
    "start": "one job from launch to first step: image, environment, checkpoint, ranks; 1 and 3 nodes (root)",
    "supervise_cost": "what looking at ranks costs: a step, a heartbeat, a look of the agent, stacks",
    "trace": "what tracing of collectives costs a call; 13 hangs and failures over process groups: who is named",
    "webhdfs": "calls to a NameNode, and a registry with 200 referrers: now and before",
    "warm": "a node is warmed by the daemon while a job trains on it; what remains of the start after it (root)",
    "zero": "starts with nothing configured, from a cold page cache: disk and FUSE store, first and second (root)",
}
# Modules of their own, as they print rows and no figures.
TRIALS = {
    "side_by_side": "jobs in trouble under torchrun and under bootrun",
    "mount_fails": "a mounted environment whose store fails, and the starts after it (root)",
}


class Bench(Protocol):
    """What a bench module has to have."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], Figures]


def load(name: str) -> Bench:
    """Imports a bench."""
    return cast(Bench, importlib.import_module(f"bench.{name}"))


def targets_of(bench: Bench, argv: Sequence[str]) -> Mapping[str, Target]:
    """The targets that a bench states for a run with these words; a bench may have none."""
    targets_for = getattr(bench, "targets_for", None)
    return cast(Mapping[str, Target], targets_for(argv) if targets_for else getattr(bench, "TARGETS", {}))


def find_targets(name: str, argv: Sequence[str]) -> Mapping[str, Target] | None:
    """The same by its name; None for a bench that does not exist."""
    return targets_of(load(name), argv) if name in BENCHES else None


def main(argv: list[str]) -> int:
    """Runs a bench or checks its JSON; returns the exit status."""
    lines = [f"  {name:12} {text}" for name, text in BENCHES.items()]
    lines.append(f"  {'numbers':12} the JSON of benches as the page docs/numbers.md")
    lines.append(f"  {'picture':12} the JSON of bench start as a picture of bars (SVG)")
    lines.append(
        f"  {'check':12} a bench's JSON against its samples and targets; without FILE: what is of older code"
    )
    lines += ["without figures:", *(f"  python -m bench.{name}: {text}" for name, text in TRIALS.items())]
    usage = "usage: python -m bench NAME [--rounds N] [--json FILE] ...\n" + "\n".join(lines)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage)
        return 0 if argv else 2
    name, rest = argv[0], argv[1:]
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", allow_abbrev=False)
    if name == "numbers":
        parser.add_argument("files", nargs="+")
        print(format_documents(parser.parse_args(rest).files, find_targets), end="")
        return 0
    if name == "picture":
        parser.add_argument("files", nargs="+")
        try:
            print(draw_documents(parser.parse_args(rest).files), end="")
        except BenchError as error:
            print(f"bench picture: {error}", file=sys.stderr)
            return 1
        return 0
    if name == "check":
        parser.add_argument("file", nargs="?", help="without it: which figures of docs/numbers are of older code")
        parser.add_argument("--figures", action="store_true", help="without FILE: name each figure of older code")
        args = parser.parse_args(rest)
        if args.file is None:
            return check_recorded(args.figures)
        return check_file(args.file, find_targets)
    if name not in BENCHES:
        print(f"no bench is called {name!r}\n{usage}", file=sys.stderr)
        return 2
    bench = load(name)
    parser.description = BENCHES[name]
    parser.add_argument("--rounds", type=int, default=getattr(bench, "ROUNDS", 7), help="samples of each figure")
    parser.add_argument("--json", metavar="FILE", help="write the figures with every sample to FILE")
    bench.add_arguments(parser)
    args = parser.parse_args(rest)
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    try:
        figures = bench.run(args)
    except BenchError as error:
        print(f"bench {name}: {error}", file=sys.stderr)
        return 1
    print(figures.table(targets_of(bench, rest)))
    if args.json:
        write_document(args.json, make_document(name, argv, figures))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
