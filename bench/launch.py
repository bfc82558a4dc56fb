"""Start and restart of a job: torchrun, bootrun and a five-line launcher of the standard library.

In each round every launcher runs once in every case, in an order that rotates from round to round; ratios are
formed within rounds. All run with the same interpreter, environment and scripts; one round before the first warms
the bytecode and page caches and is not counted. Cases: `empty` two empty scripts, `import` two scripts that import
torch (both to the end of the job), `first` start to the first statement of both ranks and the launcher's own CPU
time until then, `restart` death of a rank to the first statement of both new ranks, `two_node` two nodes on the
loopback, start to the first statement of all ranks.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from bench.processes import become_subreaper, run_all
from bench.record import BenchError, Figures, Target, note

ROUNDS = 9
MINIMUM_ROUNDS = 7
TARGETS = {
    "launch.empty_ratio": Target(at_least=20, samples=MINIMUM_ROUNDS),
    "launch.empty_vs_stdlib": Target(at_most=1.8, samples=MINIMUM_ROUNDS),
    "launch.import_ratio": Target(at_least=1.8, samples=MINIMUM_ROUNDS),
    "launch.two_node_ratio": Target(at_least=8, samples=MINIMUM_ROUNDS),
    "launch.restart_ratio": Target(at_least=3, samples=MINIMUM_ROUNDS),
}
DEADLINE_S = 120.0
HERE = os.path.dirname(os.path.abspath(__file__))
SCRIPTS = sysconfig.get_path("scripts")
# Without it torchrun's new ranks read the addresses of the old ones, and a restart fails more often than not.
SHARING_OFF = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Sample(NamedTuple):
    """One run of one launcher in one case."""

    seconds: float
    cpu_s: float  # of launcher and ranks, to the end of the job
    own_cpu_s: float = 0.0  # of the launcher's processes until the first statement of the last rank


class Place(NamedTuple):
    """Where a run happens."""

    folder: str
    environ: dict[str, str]

    def script(self, name: str) -> str:
        """The path of a rank's program."""
        return os.path.join(self.folder, name)

    def fresh(self) -> str:
        """An empty folder for what the ranks write."""
        return tempfile.mkdtemp(dir=self.folder)


Launcher = Callable[[list[str]], list[str]]  # the rank's script and its arguments to the command
Case = Callable[[Place], Sample]


def stdlib(script: list[str]) -> list[str]:
    """The command of the five-line launcher."""
    return [sys.executable, os.path.join(HERE, "stdlib_launcher.py"), "2", *script]


def standalone(program: str, *more: str) -> Launcher:
    """The command of torchrun or bootrun for two ranks on one node."""
    path = os.path.join(SCRIPTS, program)
    return lambda script: [path, "--standalone", "--nproc-per-node", "2", *more, *script]


def start_to_end(launcher: Launcher, script: str, place: Place) -> Sample:
    """A job whose ranks do nothing more than their script."""
    (ended,) = run_all([launcher([place.script(script)])], place.environ, place.folder, DEADLINE_S)
    return Sample(ended.wall_s, ended.cpu_s)


def start_to_first_statement(commands: list[Launcher], ranks: int, place: Place) -> Sample:
    """From the start of the launchers to the first statement of the last rank."""
    directory = place.fresh()
    script = [os.path.join(HERE, "launch_rank.py"), directory, str(os.getpid())]
    ended = run_all([command(script) for command in commands], place.environ, place.folder, DEADLINE_S)
    seen = read_firsts(directory, 0, ranks)
    last_ns = max(first_ns for first_ns, _ in seen)
    own_cpu_s = max(cpu_ns for _, cpu_ns in seen) / 1e9
    return Sample((last_ns - ended[0].began_ns) / 1e9, sum(end.cpu_s for end in ended), own_cpu_s)


def death_to_first_statement(launcher: Launcher, place: Place) -> Sample:
    """From the death of rank 1 to the first statement of both ranks of the next attempt."""
    directory = place.fresh()
    script = [os.path.join(HERE, "launch_rank.py"), directory, str(os.getpid()), "die"]
    (ended,) = run_all([launcher(script)], {**place.environ, SHARING_OFF: "1"}, place.folder, DEADLINE_S)
    read_firsts(directory, 0, 2)
    last_ns = max(first_ns for first_ns, _ in read_firsts(directory, 1, 2))
    with open(os.path.join(directory, "death"), encoding="ascii") as file:
        death_ns = int(file.read())
    if last_ns < death_ns:
        raise BenchError("a rank of attempt 1 ran before the death in attempt 0")
    return Sample((last_ns - death_ns) / 1e9, ended.cpu_s)


def read_firsts(directory: str, attempt: int, ranks: int) -> list[tuple[int, int]]:
    """What the ranks of an attempt wrote; each must have written."""
    found = []
    for rank in range(ranks):
        path = os.path.join(directory, f"first-{attempt}-{rank}")
        try:
            with open(path, encoding="ascii") as file:
                first_ns, cpu_ns = file.read().split()
        except FileNotFoundError:
            raise BenchError(f"rank {rank} of attempt {attempt} did not run") from None
        found.append((int(first_ns), int(cpu_ns)))
    return found


def two_nodes(program: str, place: Place) -> Sample:
    """Two agents with one rank each, started at once, at a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.path.join(SCRIPTS, program)
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-id", "bench", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    size = ["--nnodes", "2", "--nproc-per-node", "1"]

    def command(script: list[str]) -> list[str]:
        return [path, *size, *rendezvous, *script]

    return start_to_first_statement([command, command], 2, place)


def cases() -> dict[str, dict[str, Case]]:
    """Case, then launcher, then what to run."""
    plain: dict[str, Launcher] = {
        "torchrun": standalone("torchrun"),
        "bootrun": standalone("bootrun"),
        "stdlib": stdlib,
    }
    programs = ("torchrun", "bootrun")
    restarting = {name: standalone(name, "--max-restarts", "1") for name in programs}
    return {
        "empty": {name: partial(start_to_end, run, "empty.py") for name, run in plain.items()},
        "import": {name: partial(start_to_end, run, "import_torch.py") for name, run in plain.items()},
        "first": {name: partial(start_to_first_statement, [run], 2) for name, run in plain.items()},
        "restart": {name: partial(death_to_first_statement, run) for name, run in restarting.items()},
        "two_node": {name: partial(two_nodes, name) for name in programs},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--cases", nargs="+", choices=list(cases()), default=list(cases()), metavar="CASE")


def run(args: argparse.Namespace) -> Figures:
    """Measures and returns the figures."""
    become_subreaper()
    chosen = {case: launchers for case, launchers in cases().items() if case in args.cases}
    samples: dict[tuple[str, str], list[Sample]] = {
        (case, name): [] for case, launchers in chosen.items() for name in launchers
    }
    with tempfile.TemporaryDirectory(prefix="bench-launch-") as directory:
        place = make_place(directory)
        for number in range(-1, args.rounds):
            for case, launchers in chosen.items():
                names = list(launchers)
                turn = (number + 1) % len(names)
                for name in names[turn:] + names[:turn]:
                    sample = launchers[name](place)
                    if number >= 0:
                        samples[case, name].append(sample)
            note(f"round {number + 1} of {args.rounds}" if number >= 0 else "warmed up")
    if "restart" in chosen:
        note(f"restart: all launchers ran with {SHARING_OFF}=1, without which torchrun's restarts mostly fail")
    return to_figures(chosen, samples)


def make_place(directory: str) -> Place:
    """The scripts and the environment of all runs."""
    for name, text in (("empty.py", ""), ("import_torch.py", "import torch\n")):
        with open(os.path.join(directory, name), "w", encoding="ascii") as file:
            file.write(text)
    taken_out = ("PYTHONDONTWRITEBYTECODE", SHARING_OFF, "LOGLEVEL")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in taken_out and not name.startswith(("PET_", "TORCHELASTIC_", "BOOTSEER_"))
    }
    # Set, so that neither torchrun nor bootrun has to say that it chose it.
    own = {"TMPDIR": directory, "BOOTSEER_CACHE_DIR": os.path.join(directory, "cache")}
    return Place(directory, {**environ, "OMP_NUM_THREADS": "1", **own})


def to_figures(chosen: dict[str, dict[str, Case]], samples: dict[tuple[str, str], list[Sample]]) -> Figures:
    """Ratios first, then what they are made of."""
    figures = Figures()

    def seconds(case: str, name: str) -> list[float]:
        return [sample.seconds for sample in samples[case, name]]

    for case in chosen:
        if case == "first":
            continue
        figures.add_ratio(f"launch.{case}_ratio", seconds(case, "torchrun"), seconds(case, "bootrun"))
        if case == "empty":
            figures.add_ratio("launch.empty_vs_stdlib", seconds(case, "bootrun"), seconds(case, "stdlib"))
    for case, launchers in chosen.items():
        for name in launchers:
            figures.add(f"launch.{case}_{name}_s", "s", seconds(case, name))
            cpu = [sample.cpu_s for sample in samples[case, name]]
            figures.add(f"launch.{case}_{name}_cpu_s", "CPU s", cpu)
            own = [sample.own_cpu_s for sample in samples[case, name]]
            if any(own):
                figures.add(f"launch.{case}_{name}_own_cpu_s", "CPU s", own)
    return figures
