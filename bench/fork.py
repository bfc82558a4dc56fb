"""Forked ranks: time of start and restart, and memory, against torchrun, against exec, and against the floor.

Cases, for 2 and 8 ranks. `restart`: death of a rank until all ranks of the next attempt are past
init_process_group (gloo) and an all-reduce; torchrun, bootrun, and the floor, which only forks, joins and reduces
(fork_floor.py). `first`: start of the launcher to the same point, of a script that imports torch and transformers;
torchrun, bootrun told so (--preload transformers), and bootrun without any hint (`plain`), both without records of
an earlier start. `memory`, 8 ranks: summed PSS of the ranks and what they started, exec'd and forked by bootrun,
the preloaded process counted with the forked ones; bootrun's own three processes are counted on neither side. It
is taken when all ranks are past the all-reduce, and again after 100 training steps (DDP and AdamW); the script
imports torch and transformers, and the warm-up's record of imports is used, as by any second start of a job.

In each round all take turns, in an order that rotates; ratios are formed within rounds; a round before the first
is not counted. All run with OMP_NUM_THREADS=1, the same interpreter and script, and in a network namespace of
their own, in which reverse look-ups of addresses fail at once: torch makes them for each connection, and a slow
name server would decide the result. That needs root.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import fcntl
import glob
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from bench import fork_programs
from bench.launch import SCRIPTS, SHARING_OFF, Place, make_place
from bench.processes import Ended, Running, become_subreaper, reap_orphans, run_all
from bench.record import BenchError, Figures, Target, note

ROUNDS = 9
MINIMUM_ROUNDS = 7
TARGETS = {
    "fork.restart_ratio_2": Target(at_least=12, samples=MINIMUM_ROUNDS),
    "fork.restart_ratio_8": Target(at_least=20, samples=MINIMUM_ROUNDS),
    "fork.restart_vs_floor_2": Target(at_most=2, samples=MINIMUM_ROUNDS),
    "fork.restart_vs_floor_8": Target(at_most=2, samples=MINIMUM_ROUNDS),
    "fork.pss_ratio_8": Target(at_least=3.5, samples=MINIMUM_ROUNDS),
    "fork.pss_ratio_8_trained": Target(at_least=3.5, samples=MINIMUM_ROUNDS),
}
CASES = ("restart", "first", "memory")
SIZES = (2, 8)
MEMORY_RANKS = 8
DEADLINE_S = 180.0
# What bootrun's preloaded process is called in ps.
FORK_SERVER = "bootrun-preload"
NOT_FORKED = "exec'd, not forked"
HERE = os.path.dirname(os.path.abspath(__file__))
CLONE_NEWNET = 0x40000000
SIOCSIFFLAGS = 0x8914
IFF_UP = 1


class Sample(NamedTuple):
    """One run: its figures by name, of which `s` is the time that ratios are made of."""

    values: dict[str, float]
    refused: int  # connections that found nobody listening, after which torch's store sleeps 0.3-0.7 s


Case = Callable[[Place], Sample]
Cases = dict[tuple[str, int], dict[str, Case]]  # case and number of ranks, then who runs it


def command(program: str, ranks: int, *more: str) -> list[str]:
    """torchrun or bootrun on one node, up to the script."""
    return [os.path.join(SCRIPTS, program), "--standalone", "--nproc-per-node", str(ranks), *more]


def environ_of(place: Place, directory: str, cache: str) -> dict[str, str]:
    """The environment of a run that writes to `directory`."""
    # The moment of death has no fixed relation to the moments at which a launcher looks.
    settle_s = random.uniform(0.3, 0.5)
    ours = {"BENCH_FORK_FOLDER": directory, "BENCH_FORK_SETTLE_S": str(settle_s), "BOOTSEER_CACHE_DIR": cache}
    return {**place.environ, **ours, SHARING_OFF: "1"}


def launch(argv: list[str], case: list[str], place: Place, forked: int) -> tuple[str, Ended, int]:
    """Runs a launcher to its end; where the ranks wrote, how it ended, and the refused connections."""
    directory = place.fresh()
    logs = os.path.join(directory, "logs")
    before = count_refused()
    script = [place.script("fork_rank.py"), *case]
    environ = environ_of(place, directory, os.path.join(directory, "cache"))
    (ended,) = run_all([[*argv, "--log-dir", logs, *script]], environ, place.folder, DEADLINE_S)
    if forked:
        check_forked(logs, ended.output, forked)
    return directory, ended, count_refused() - before


def restart(argv: list[str], ranks: int, forked: int, place: Place) -> Sample:
    """From the death of the last rank until all ranks of the next attempt are past the all-reduce."""
    directory, ended, refused = launch([*argv, "--max-restarts", "1"], ["restart"], place, forked)
    read_moments(directory, "past-0", ranks)
    last_ns = max(past_ns for past_ns, _ in read_moments(directory, "past-1", ranks))
    with open(os.path.join(directory, "death"), encoding="ascii") as file:
        death_ns = int(file.read())
    if last_ns < death_ns:
        raise BenchError("attempt 1 ran before the death in attempt 0")
    return Sample({"s": (last_ns - death_ns) / 1e9, "cpu_s": ended.cpu_s}, refused)


def first(argv: list[str], ranks: int, forked: int, place: Place) -> Sample:
    """From the start of the launcher until all ranks are past the all-reduce."""
    directory, ended, refused = launch(argv, ["first", "transformers"], place, forked)
    last_ns = max(past_ns for past_ns, _ in read_moments(directory, "past-0", ranks))
    return Sample({"s": (last_ns - ended.began_ns) / 1e9, "cpu_s": ended.cpu_s}, refused)


def floor(ranks: int, place: Place) -> Sample:
    """What forking, joining and reducing takes without a launcher.

    The second of the two ordinary sets counts: the process has forked before, as bootrun's has at a restart.
    """
    before = count_refused()
    argv = [sys.executable, place.script("fork_floor.py"), str(ranks)]
    (ended,) = run_all([argv], place.environ, place.folder, DEADLINE_S)
    first_s, again_s, listening_s = (float(text) for text in ended.output.split("\n")[-2].split())
    values = {"s": again_s, "first_s": first_s, "listening_s": listening_s}
    return Sample(values, count_refused() - before)


def memory(argv: list[str], forked: bool, place: Place) -> Sample:
    """Summed PSS of a job that waits to be measured: past the all-reduce, and after its training steps."""
    directory = place.fresh()
    logs = os.path.join(directory, "logs")
    before = count_refused()
    script = [place.script("fork_rank.py"), "memory", "transformers"]
    # One cache for all rounds: the warm-up's record of imports is there.
    environ = environ_of(place, directory, os.path.join(place.folder, "cache"))
    program = Running([*argv, "--log-dir", logs, *script], environ, os.path.join(directory, "output"))
    found: dict[str, float] = {}
    try:
        for moment, name, go in (("past-0", "", "measured"), ("trained-0", "_trained", "measured-again")):
            ranks = [pid for _, pid in wait_for_moments(program, directory, moment)]
            fork_server = find_fork_server(program.pid)
            if len(fork_server) != int(forked):
                raise BenchError(f"{len(fork_server)} preloaded processes with forked={forked}\n{program.text()}")
            found[f"pss{name}_mib"] = sum(map(pss_mib, with_descendants([*ranks, *fork_server])))
            if fork_server:
                found[f"preloaded_pss{name}_mib"] = sum(map(pss_mib, fork_server))
            with open(os.path.join(directory, go), "w", encoding="ascii"):
                pass
    except BaseException:
        os.kill(program.pid, signal.SIGKILL)
        raise
    finally:
        status, _, cpu_s = program.wait(DEADLINE_S)
        cpu_s += reap_orphans()
    if status != 0:
        raise BenchError(f"exit status {status} instead of 0: {' '.join(program.argv)}\n{program.text()[-4000:]}")
    if forked:
        check_forked(logs, program.text(), MEMORY_RANKS)
    return Sample({**found, "cpu_s": cpu_s}, count_refused() - before)


def read_moments(directory: str, name: str, ranks: int) -> list[tuple[int, int]]:
    """What the ranks wrote, moment and pid; each must have written."""
    found = []
    for rank in range(ranks):
        try:
            with open(os.path.join(directory, f"{name}-{rank}"), encoding="ascii") as file:
                moment_ns, pid = file.read().split()
        except FileNotFoundError:
            raise BenchError(f"{name}: rank {rank} wrote nothing") from None
        found.append((int(moment_ns), int(pid)))
    return found


def wait_for_moments(program: Running, directory: str, name: str) -> list[tuple[int, int]]:
    """The same of a job that runs, as soon as all have written."""
    end_s = time.monotonic() + DEADLINE_S
    while len(glob.glob(os.path.join(directory, f"{name}-[0-9]"))) < MEMORY_RANKS:
        ended = os.waitid(os.P_PID, program.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None or time.monotonic() > end_s:
            raise BenchError(f"{name}: not all ranks came so far\n{program.text()[-4000:]}")
        time.sleep(0.02)
    return read_moments(directory, name, MEMORY_RANKS)


def check_forked(logs: str, output: str, ranks: int) -> None:
    """A time or size of ranks that were not forked, though they should be, is no figure."""
    how = [event["attrs"].get("how") for event in read_events(logs) if event["name"] == "rank_started"]
    if NOT_FORKED in output or how != ["fork"] * ranks:
        raise BenchError(f"{ranks} ranks should have been forked; started by: {how}\n{output[-4000:]}")


def read_events(logs: str) -> Iterable[dict[str, Any]]:
    """bootrun's own events of a run."""
    for path in glob.glob(os.path.join(logs, "*", "events", "agent-*.jsonl")):
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)


def children_of(pid: int) -> list[int]:
    """Its children, of all its threads; none when it has ended."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    except OSError:
        pass
    return found


def with_descendants(pids: Iterable[int]) -> set[int]:
    """The processes and all below them."""
    found: set[int] = set()
    left = list(pids)
    while left:
        pid = left.pop()
        if pid not in found:
            found.add(pid)
            left += children_of(pid)
    return found


def find_fork_server(launcher: int) -> list[int]:
    """Processes below the launcher that bear the name of the preloaded one."""
    found = []
    for pid in with_descendants([launcher]):
        try:
            with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as file:
                if file.read().rstrip("\n") == FORK_SERVER:
                    found.append(pid)
        except OSError:
            continue
    return found


def pss_mib(pid: int) -> float:
    """Its proportional share of the memory that it uses, in MiB."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
    raise BenchError(f"no Pss in /proc/{pid}/smaps_rollup")


def count_refused() -> int:
    """Connections that nobody accepted so far, of this network namespace."""
    with open("/proc/self/net/snmp", encoding="ascii") as file:
        names, values = (line.split() for line in file if line.startswith("Tcp:"))
    return int(values[names.index("AttemptFails")])


def enter_private_network() -> bool:
    """Moves this process, and what it starts, to a network of its own that has a loopback; False without the
    right to."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        if number in (errno.EPERM, errno.EINVAL):
            return False
        raise OSError(number, "unshare(CLONE_NEWNET)")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))
    return True


def cases(names: Iterable[str], sizes: Iterable[int]) -> Cases:
    """What to run."""
    made: Cases = {}
    fork = ("--fork-ranks", "on")
    for ranks in sizes:
        torchrun, bootrun = command("torchrun", ranks), command("bootrun", ranks, *fork)
        if "restart" in names:
            made["restart", ranks] = {
                "torchrun": partial(restart, torchrun, ranks, 0),
                "bootrun": partial(restart, bootrun, ranks, 2 * ranks),
                "floor": partial(floor, ranks),
            }
        if "first" in names:
            made["first", ranks] = {
                "torchrun": partial(first, torchrun, ranks, 0),
                "bootrun": partial(first, [*bootrun, "--preload", "transformers"], ranks, ranks),
                "plain": partial(first, bootrun, ranks, ranks),
            }
    if "memory" in names:
        made["memory", MEMORY_RANKS] = {
            "exec": partial(memory, command("bootrun", MEMORY_RANKS, "--fork-ranks", "off"), False),
            "fork": partial(memory, command("bootrun", MEMORY_RANKS, *fork), True),
        }
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--sizes", nargs="+", type=int, choices=SIZES, default=list(SIZES), metavar="RANKS")
    parser.add_argument("--programs", nargs="*", choices=list(fork_programs.PROGRAMS), metavar="PROGRAM")


def targets_for(argv: Sequence[str]) -> Mapping[str, Target]:
    """What a run with these words has to reach."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    args, _ = parser.parse_known_args(argv)
    return TARGETS if args.programs is None else fork_programs.targets_of(args.programs)


def run(args: argparse.Namespace) -> Figures:
    """Measures and returns the figures."""
    if args.programs is not None:
        become_subreaper()
        figures = Figures()
        fork_programs.measure(figures, args.rounds, args.programs or list(fork_programs.PROGRAMS))
        return figures
    needed = ["torch", *(["transformers"] if {"first", "memory"} & set(args.cases) else [])]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise BenchError(f"{name} is not installed here: pip install '.[bench]' (or --cases restart)")
    become_subreaper()
    private = enter_private_network()
    if not private:
        note("no right to a private network (root has it): a slow name server may slow all launchers")
    chosen = cases(args.cases, args.sizes)
    samples: dict[tuple[str, int, str], list[Sample]] = {
        (*case, name): [] for case, runs in chosen.items() for name in runs
    }
    with tempfile.TemporaryDirectory(prefix="bench-fork-") as directory:
        place = make_place(directory)
        for script in ("fork_rank.py", "fork_floor.py"):
            # Not where they are: a script's folder is searched first, and there `numbers` is one of ours.
            shutil.copy(os.path.join(HERE, script), directory)
        for number in range(-1, args.rounds):
            for case, runs in chosen.items():
                names = list(runs)
                turn = (number + 1) % len(names)
                for name in names[turn:] + names[:turn]:
                    sample = runs[name](place)
                    if number >= 0:
                        samples[*case, name].append(sample)
            note(f"round {number + 1} of {args.rounds}" if number >= 0 else "warmed up")
    note(f"all launchers ran with {SHARING_OFF}=1, without which torchrun's restarts mostly fail")
    return to_figures(samples, private)


def to_figures(samples: dict[tuple[str, int, str], list[Sample]], private: bool) -> Figures:
    """Ratios first, then what they are made of, then the worst and the refused connections."""
    figures = Figures()

    def values(case: str, ranks: int, name: str, value: str = "s") -> list[float]:
        return [sample.values[value] for sample in samples[case, ranks, name]]

    def add_ratio(figure: str, above: list[float], below: list[float]) -> None:
        figures.add_ratio(f"fork.{figure}", above, below)

    for case, ranks in dict.fromkeys((case, ranks) for case, ranks, _ in samples):
        of = partial(values, case, ranks)
        if case == "restart":
            add_ratio(f"restart_ratio_{ranks}", of("torchrun"), of("bootrun"))
            add_ratio(f"restart_vs_floor_{ranks}", of("bootrun"), of("floor"))
        elif case == "first":
            add_ratio(f"first_ratio_{ranks}", of("torchrun"), of("bootrun"))
            add_ratio(f"first_plain_ratio_{ranks}", of("torchrun"), of("plain"))
        else:
            add_ratio(f"pss_ratio_{ranks}", of("exec", "pss_mib"), of("fork", "pss_mib"))
            trained = "pss_trained_mib"
            add_ratio(f"pss_ratio_{ranks}_trained", of("exec", trained), of("fork", trained))
    for (case, ranks, name), taken in samples.items():
        for value in taken[0].values:
            unit = "CPU s" if value == "cpu_s" else "MiB" if value.endswith("mib") else "s"
            figures.add(f"fork.{case}_{name}_{ranks}_{value}", unit, values(case, ranks, name, value))
        if "s" in taken[0].values:
            # The worst of all rounds: a median hides a start that met a sleeping store.
            figures.add(f"fork.{case}_{name}_{ranks}_worst_s", "s", [max(values(case, ranks, name))])
        if private:
            refused = float(sum(sample.refused for sample in taken))
            figures.add(f"fork.{case}_{name}_{ranks}_refused", "refused connections in all runs", [refused])
    return figures
