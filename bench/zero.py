"""Starts with nothing configured, from a cold page cache: torchrun, bootrun's first start and its second.

The same script (zero_rank.py: torch, transformers where it is there, one step), one rank, from the start of the
launcher to the end of the first step. `disk`: the environment is on this disk; `store`: it is in a store that is
mounted by FUSE and answers each request after 2 ms. Launcher, ranks and everything else run from that environment.

    torchrun   torchrun
    first      bootrun, of which nothing is known
    second     bootrun once more: what the first start touched is read ahead
    unread     the same with --record-start off: it knows its hot imports, and reads nothing ahead

In each round torchrun goes first or last by turns, and so do `second` and `unread`; ratios are formed within
rounds; a round before the first is not counted. `start.record_cpu_s`: CPU seconds of bootrun's own processes (all
but the rank; helpers are waited for and count) with recording above those without, on a warm cache, where nothing
is recorded yet (the dearest case), alternating; `start.record_again_cpu_s`: the same of the next start, which has
a record. Root, as the page cache is dropped and the store is mounted.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.fork import enter_private_network
from bench.launch import make_place
from bench.processes import Ended, become_subreaper, run_all
from bench.record import BenchError, Figures, Target, note
from bench.zero_places import Disk, Store

ROUNDS = 7
TARGETS = {"start.record_cpu_s": Target(at_most=0.05, samples=7)}
WAYS = ("torchrun", "first", "second", "unread")
PLACES = ("disk", "store")
LATENCY_MS, VALID_S = 2.0, 60.0
DEADLINE_S = 600.0
# After the step a real job trains, and is recorded meanwhile: thousands of files are looked at, one by one.
GOES_ON_S = {"disk": 2.0, "store": 40.0}
HERE = os.path.dirname(os.path.abspath(__file__))


class Sample(NamedTuple):
    """One start."""

    seconds: float  # to the end of the first step
    cpu_s: float  # of all processes
    own_cpu_s: float  # of these, all but the rank
    events: list[dict[str, Any]]
    requests: int = 0  # of the store

    def facts(self, name: str) -> dict[str, Any]:
        """What a helper has said; {} if it has not run."""
        return next((e["attrs"] for e in self.events if e["name"] == name and e["kind"] == "end"), {})


class Starts:
    """Runs starts in one folder."""

    def __init__(self, folder: str) -> None:
        self._place = make_place(folder)
        self._cache = os.path.join(folder, "cache")
        self._script = os.path.join(folder, "zero_rank.py")
        # Not where it is: a script's folder is searched first, and there `numbers` is one of ours.
        shutil.copy(os.path.join(HERE, "zero_rank.py"), self._script)

    def forget(self) -> None:
        """Nothing is known of any start."""
        shutil.rmtree(self._cache, ignore_errors=True)

    def torchrun(self, python: str) -> Sample:
        """One start."""
        return self._run([python, "-m", "torch.distributed.run", "--standalone"], 0.0, has_events=False)

    def bootrun(self, python: str, *flags: str, goes_on_s: float = 0.0) -> Sample:
        """One start."""
        return self._run([python, "-m", "launcher", "--standalone", *flags], goes_on_s, has_events=True)

    def _run(self, argv: Sequence[str], goes_on_s: float, *, has_events: bool) -> Sample:
        directory = self._place.fresh()
        moment, logs = os.path.join(directory, "moment"), os.path.join(directory, "logs")
        environ = {**self._place.environ, "BOOTSEER_CACHE_DIR": self._cache}
        command = [*argv, "--nproc-per-node", "1", "--log-dir", logs, self._script, moment, str(goes_on_s)]
        ended = run_apart(command, environ, self._place.folder)
        with open(moment, encoding="ascii") as file:
            step_ns = int(file.read().split()[0])
        events = list(_read_events(logs)) if has_events else []
        rank_cpu_s = sum(each["attrs"]["cpu_s"] for each in events if each["name"] == "rank_exited")
        return Sample((step_ns - ended.began_ns) / 1e9, ended.cpu_s, ended.cpu_s - rank_cpu_s, events)


def run_apart(command: Sequence[str], environ: Mapping[str, str], directory: str) -> Ended:
    """Runs a command from a process of its own: the store's server is a child of this one, and not waited for."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            become_subreaper()
            (ended,) = run_all([command], environ, directory, DEADLINE_S)
            answer: dict[str, Any] = {"ended": ended}
        except BaseException as error:
            answer = {"error": str(error)}
        try:
            os.write(theirs, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as file:
        found = json.loads(file.read() or b'{"error": "the start was lost"}')
    os.waitpid(pid, 0)
    if "error" in found:
        raise BenchError(found["error"])
    return Ended(*found["ended"])


def _read_events(logs: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for path in glob.glob(os.path.join(logs, "*", "events", "agent-*.jsonl")):
        with open(path, encoding="utf-8") as file:
            found += map(json.loads, file)
    return found


def cold_round(starts: Starts, place: Disk | Store, number: int) -> dict[str, Sample]:
    """All ways once, each from a cold cache."""
    found: dict[str, Sample] = {}

    def run(way: str) -> None:
        with place.cold():
            if way == "torchrun":
                sample = starts.torchrun(place.python)
            else:
                flags = ("--record-start", "off") if way == "unread" else ()
                goes_on_s = GOES_ON_S[place.name] if way == "first" else 0.5
                sample = starts.bootrun(place.python, *flags, goes_on_s=goes_on_s)
        note(f"{place.name}: {way} {sample.seconds:.2f} s")
        found[way] = sample._replace(requests=sum(place.requests.values()) if isinstance(place, Store) else 0)

    starts.forget()
    after = ["second", "unread"] if number % 2 else ["unread", "second"]
    ours = ["first", *after]
    for way in [*ours, "torchrun"] if number % 2 else ["torchrun", *ours]:
        run(way)
    if not found["first"].facts("start_recorded").get("files"):
        raise BenchError(f"the first start was not recorded: {found['first'].facts('start_recorded')}")
    if not found["second"].facts("prefetch").get("files"):
        raise BenchError(f"the second start was not read ahead: {found['second'].facts('prefetch')}")
    return found


def warm_round(starts: Starts, number: int) -> dict[str, Sample]:
    """With and without recording, nothing known, on a warm cache; ranks are exec'd, so that theirs can be told."""
    found = {}
    for value in ("on", "off") if number % 2 else ("off", "on"):
        starts.forget()
        words = (Disk.python, "--fork-ranks", "off", "--record-start", value)
        found[value] = starts.bootrun(*words, goes_on_s=GOES_ON_S["disk"])
        if value == "on":
            found["again"] = starts.bootrun(*words, goes_on_s=GOES_ON_S["disk"])
    if not found["on"].facts("start_recorded").get("files"):
        raise BenchError(f"the start was not recorded: {found['on'].facts('start_recorded')}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--places", nargs="*", choices=PLACES, default=list(PLACES), metavar="PLACE")
    parser.add_argument("--no-record", action="store_true", help="leave out start.record_cpu_s")
    parser.add_argument("--latency-ms", type=float, default=LATENCY_MS, help="of each request of the store (2)")
    parser.add_argument("--valid-s", type=float, default=VALID_S, help="how long names may be kept (60)")


def run(args: argparse.Namespace) -> Figures:
    """Measures and returns the figures."""
    if not enter_private_network():
        raise BenchError("this bench needs root")
    cold: dict[str, list[dict[str, Sample]]] = {name: [] for name in args.places}
    warm: list[dict[str, Sample]] = []
    with tempfile.TemporaryDirectory(prefix="bench-zero-", ignore_cleanup_errors=True) as directory:
        starts = Starts(directory)
        store = Store(directory, args.latency_ms, args.valid_s) if "store" in args.places else None
        places: dict[str, Disk | Store] = {"disk": Disk(), **({"store": store} if store else {})}
        try:
            for number in range(-1, args.rounds):
                for name in args.places:
                    samples = cold_round(starts, places[name], number)
                    if number >= 0:
                        cold[name].append(samples)
                if not args.no_record:
                    pair = warm_round(starts, number)
                    if number >= 0:
                        warm.append(pair)
                note(f"round {number + 1} of {args.rounds}" if number >= 0 else "warmed up")
        finally:
            if store is not None:
                store.close()
    return to_figures(cold, warm)


def to_figures(cold: dict[str, list[dict[str, Sample]]], warm: list[dict[str, Sample]]) -> Figures:
    """Ratios first, then what they are made of."""
    figures = Figures()
    for name, rounds in cold.items():
        by_way = {way: [samples[way] for samples in rounds] for way in WAYS}
        seconds = {way: [sample.seconds for sample in samples] for way, samples in by_way.items()}
        for other in ("torchrun", "first", "unread"):
            figures.add_ratio(f"start.zero_{name}_{other}_over_second", seconds[other], seconds["second"])
        for way in WAYS:
            figures.add(f"start.zero_{name}_{way}_s", "s", seconds[way])
            figures.add(f"start.zero_{name}_{way}_cpu_s", "CPU s", [sample.cpu_s for sample in by_way[way]])
            if name == "store":
                requests = [float(sample.requests) for sample in by_way[way]]
                figures.add(f"start.zero_{name}_{way}_requests", "requests", requests)
        read = [sample.facts("prefetch") for sample in by_way["second"]]
        figures.add(f"start.zero_{name}_prefetch_s", "s", [facts["took_s"] for facts in read])
        figures.add(f"start.zero_{name}_prefetch_mb", "MB", [facts["bytes"] / 1e6 for facts in read])
        figures.add(f"start.zero_{name}_prefetch_files", "files", [float(facts["files"]) for facts in read])
        figures.add(f"start.zero_{name}_prefetch_cpu_s", "CPU s", [facts["cpu_s"] for facts in read])
    if warm:
        figures.add("start.record_cpu_s", "CPU s", [pair["on"].own_cpu_s - pair["off"].own_cpu_s for pair in warm])
        again = [pair["again"].own_cpu_s - pair["off"].own_cpu_s for pair in warm]
        figures.add("start.record_again_cpu_s", "CPU s", again)
        helper = [pair["on"].facts("start_recorded")["cpu_s"] for pair in warm]
        figures.add("start.record_helper_cpu_s", "CPU s", helper)
        figures.add("start.record_all_cpu_s", "CPU s", [pair["on"].cpu_s - pair["off"].cpu_s for pair in warm])
    return figures
