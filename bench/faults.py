"""`python -m bench faults`: faults in a real job of two nodes with four ranks: seen, how soon, who is blamed.

What is injected and what must be said is in bench/faults.toml, drawn by --seed. bootrun runs with its defaults,
`--tee 3 --max-restarts 3` and what the plan adds; torchrun with the same, where it has such flags. A hang is in
time within max(15 s, 3 times the longest gap between steps before it). Misses are counted.
--healthy adds jobs in which nothing is wrong, in real time and on a virtual clock (bench/hang_jobs.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from statistics import median
from typing import Any, NamedTuple

from bench import netns
from bench.faults_healthy import add_healthy
from bench.faults_job import Job
from bench.faults_judge import Outcome, Verdict, is_exit, is_settled, judge
from bench.faults_outside import build_clock, inject, why_not
from bench.faults_plan import STEPS_S, Injection, draw, read_faults
from bench.record import BenchError, Figures, Target, note

ROUNDS = 1
PLAN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "faults.toml")
START_S = 120.0  # from the launch to the fault, beside the steps before it
LOOK_S = 0.05
TORCHRUN_S = 120.0
HEALTHY_MINUTES, HEALTHY_HOURS = 30.0, 1000.0
TARGETS = {
    "faults.seen_share": Target(at_least=1.0),
    "faults.class_right_share": Target(at_least=0.95),
    "faults.culprit_right_share": Target(at_least=0.95),
    "faults.exit_detect_s": Target(at_most=2.0),
    "faults.hang_detect_share": Target(at_least=1.0),
    "faults.left_processes": Target(at_most=0.0),
    "faults.broken": Target(at_most=0.0),
    "faults.false_alarms": Target(at_most=0.0),
    "faults.false_alarms_per_1000h": Target(at_most=1.0),
    "faults.agent_cores": Target(at_most=0.01),
}


class Tried(NamedTuple):
    """An injection, and what came of it under each launcher that was tried."""

    injection: Injection
    ours: Verdict | None
    outcome: Outcome  # of ours
    torchruns: Verdict | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument(
        "--seed", type=int, default=1, help="of moments, ranks and nodes; each round takes the next"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="names of faults; can be repeated"
    )
    parser.add_argument("--cadence", type=float, choices=STEPS_S, help="only faults at so many seconds a step")
    parser.add_argument("--limit", type=int, metavar="N", help="only the first N")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--held-out", action="store_true", help="only those")
    which.add_argument("--not-held-out", action="store_true", help="without those")
    column = parser.add_mutually_exclusive_group()
    column.add_argument("--no-torchrun", action="store_true", help="without torchrun's column")
    column.add_argument("--only-torchrun", action="store_true", help="only torchrun's column")
    parser.add_argument("--no-faults", action="store_true", help="only what --healthy adds")
    parser.add_argument(
        "--healthy", type=float, nargs="?", const=HEALTHY_MINUTES, metavar="MINUTES", help="of real jobs"
    )
    parser.add_argument("--hours", type=float, default=HEALTHY_HOURS, help="on the virtual clock, with --healthy")
    parser.add_argument("--keep", metavar="DIR", help="keep what was said, and outputs, in this folder")
    parser.add_argument(
        "--kept", metavar="DIR", help="what --keep has kept there of the same injection is not tried again"
    )


def choose(plan: Sequence[Injection], args: argparse.Namespace) -> list[Injection]:
    """Those that were asked for. Raises: BenchError where there is none."""
    found = [
        each
        for each in plan
        if (not args.only or any(fnmatchcase(each.fault.name, glob) for glob in args.only))
        and args.cadence in (None, each.step_s)
        and not (args.held_out and not each.fault.is_held_out)
        and not (args.not_held_out and each.fault.is_held_out)
    ]
    if not found:
        raise BenchError("no fault is called so at this cadence: the names are in bench/faults.toml")
    return found[: args.limit]


def run(args: argparse.Namespace) -> Figures:
    """All that was asked for, one after the other."""
    reason = netns.why_not()
    if reason:
        raise BenchError(reason)
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as directory:
        trial = Trial(directory, args.keep, args.kept)
        if not args.no_faults:
            with open(PLAN, "rb") as file:
                faults = read_faults(file.read(), PLAN)
            tried: list[Tried] = []
            for number in range(args.rounds):
                note(f"seed {args.seed + number}")
                launchers = ("torchrun",) if args.only_torchrun else ("bootrun", "torchrun")
                plan = choose(draw(faults, args.seed + number), args)
                tried += trial.run_all(plan, launchers[:1] if args.no_torchrun else launchers)
            print("\n".join(table(tried)))
            add_figures(figures, tried)
            figures.add("faults.broken", "faults without a figure", [trial.broken])
        if args.healthy is not None:
            add_healthy(figures, args.healthy, args.hours, args.seed, trial.cache)
    return figures


class Trial:
    """Runs injections; what all runs share lies in `folder`."""

    def __init__(self, folder: str, keep: str | None, kept: str | None = None) -> None:
        self.cache = f"{folder}/cache"
        self.broken = 0  # injections that came to no end from which to judge
        self._keep = keep
        self._kept = kept
        self._directory = folder
        self._clock = ""
        self._known_flags = _known_flags()

    def run_all(self, plan: Sequence[Injection], launchers: Sequence[str]) -> Iterator[Tried]:
        """Those that can be had here."""
        for number, injection in enumerate(plan, 1):
            reason = why_not(injection)
            if reason:
                note(f"{number}/{len(plan)} {injection.key}: not run here: {reason}")
                continue
            began_s = time.monotonic()
            try:
                found = {launcher: self._run_or_read(injection, launcher) for launcher in launchers}
            except BenchError as error:
                self.broken += 1
                note(f"{number}/{len(plan)} {injection.key}: no figure can be made of it: {error}")
                continue
            took = f"[{time.monotonic() - began_s:.0f} s]"
            note(f"{number}/{len(plan)} {_brief(injection, found[launchers[0]][0])} {took}")
            ours, outcome = found.get("bootrun", (None, Outcome()))
            yield Tried(injection, ours, outcome, found["torchrun"][0] if "torchrun" in found else None)

    def _run_or_read(self, injection: Injection, launcher: str) -> tuple[Verdict, Outcome]:
        path = "" if self._kept is None else f"{self._kept}/{injection.key}-{launcher}/verdict.json"
        return read_kept(path, injection) if os.path.exists(path) else self._run(injection, launcher)

    def _run(self, injection: Injection, launcher: str) -> tuple[Verdict, Outcome]:
        flags, left_out = self._flags(injection, launcher)
        preload = self._build_clock() if injection.fault.do == "clock" else ""
        with netns.Hosts(2) as hosts:
            job = Job(hosts, injection, launcher, self.cache, flags, preload)
            try:
                outcome = follow(job, TORCHRUN_S if launcher == "torchrun" else None)
            except BenchError as error:
                raise BenchError(f"{injection.key}, {launcher}: {error}\n{job.text()[-8000:]}") from error
            finally:
                left = job.close()
            outcome = outcome._replace(left=left)
            verdict = judge(injection, outcome)
            if left_out:
                verdict = verdict._replace(note="; ".join([*filter(None, [verdict.note]), f"without {left_out}"]))
            if self._keep:
                self._keep_run(job, launcher, outcome, verdict)
        return verdict, outcome

    def _flags(self, injection: Injection, launcher: str) -> tuple[list[str], str]:
        """Flags of the plan that this launcher has, and those that it has not."""
        taken: list[str] = []
        left_out: list[str] = []
        words = list(injection.fault.policy)
        while words:
            flag = [words.pop(0)]
            while words and not words[0].startswith("--"):
                flag.append(words.pop(0))
            known = flag[0] == "--nnodes" if launcher == "torchrun" else flag[0] in self._known_flags
            (taken if known else left_out).extend(flag)
        return taken, " ".join(left_out) if launcher == "bootrun" else ""

    def _build_clock(self) -> str:
        if not self._clock:
            self._clock = build_clock(self._directory)
        return self._clock

    def _keep_run(self, job: Job, launcher: str, outcome: Outcome, verdict: Verdict) -> None:
        assert self._keep is not None
        directory = os.path.join(self._keep, f"{job.injection.key}-{launcher}")
        shutil.rmtree(directory, ignore_errors=True)
        os.makedirs(directory)
        record: dict[str, Any] = {
            "injection": _as_record(job.injection),
            "outcome": {**outcome._asdict(), "words": [word._asdict() for word in outcome.words]},
            "verdict": verdict._asdict(),
        }
        with open(f"{directory}/verdict.json", "w", encoding="utf-8") as file:
            json.dump(record, file, indent=1)
        with open(f"{directory}/output.txt", "w", encoding="utf-8") as file:
            file.write(job.text())


def read_kept(path: str, injection: Injection) -> tuple[Verdict, Outcome]:
    """What --keep has kept of an earlier run; of the outcome what was left alone.

    Raises: BenchError where it is of another injection.
    """
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        if record["injection"] != json.loads(json.dumps(_as_record(injection))):
            raise BenchError(f"{path}: of another injection: take the same --seed")
        return Verdict(**record["verdict"]), Outcome(left=int(record["outcome"]["left"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{path}: {error}") from error


def _as_record(injection: Injection) -> dict[str, Any]:
    return {**injection._asdict(), "fault": injection.fault.name}


def follow(job: Job, max_s: float | None) -> Outcome:
    """Until the fault was injected and nothing more is waited for; `max_s` after it, if nothing is said."""
    injection = job.injection
    outside = injection.fault.by == "outside"
    steps_s = injection.step_s * (max(injection.at_step, 0) + 1)
    start_by_s = job.began_s + START_S + 4 * steps_s
    while True:
        job.look()
        now_s = time.monotonic()
        if job.injected_s is None:
            reached_s = job.reached_s()
            if reached_s is not None:
                job.injected_s = time.monotonic() if outside else reached_s
                if outside:
                    inject(job)
                continue
            if now_s > start_by_s:
                raise BenchError("the job did not come to the moment of the fault")
            if job.outcome(now_s).ended_s is not None:
                raise BenchError("the job ended before the fault")
        else:
            outcome = job.outcome(job.injected_s)
            if is_settled(injection, outcome, now_s - job.injected_s, max_s):
                return outcome
        time.sleep(LOOK_S)


def table(tried: Sequence[Tried]) -> list[str]:
    """A row for each: what was said, and in brackets what should have been."""
    rows: list[tuple[str, ...]] = [
        ("fault", "seen s", "class", "culprit", "done", "goes on s", "torchrun", "note")
    ]
    for each in tried:
        fault, ours, theirs = each.injection.fault, each.ours, each.torchruns
        other = "-"
        if theirs is not None:
            other = (
                f"no in {TORCHRUN_S:.0f} s"
                if theirs.seen_s is None
                else f"{theirs.seen_s:.1f} "
                + _cell(theirs.culprit, theirs.is_culprit_right, _wanted_culprit(each.injection))
            )
            if fault.is_harmless:
                other = "nothing" if theirs.is_right else other
        rows.append(
            (
                each.injection.key + (" *" if fault.is_held_out else ""),
                *(_cells(each.injection, ours) if ours is not None else ("-",) * 5),
                other,
                ours.note[:90] if ours is not None else "",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return [*lines, "(* held out; a wrong value: reported, not: expected)"]


def _cells(injection: Injection, ours: Verdict) -> tuple[str, ...]:
    return (
        _seconds(ours.seen_s) + ("" if ours.is_right else " WRONG"),
        _cell(ours.class_, ours.is_class_right, injection.fault.class_),
        _cell(ours.culprit, ours.is_culprit_right, _wanted_culprit(injection)),
        _cell(ours.action, ours.is_action_right, injection.fault.action),
        _seconds(ours.goes_on_s),
    )


def _cell(said: str, is_right: bool, wanted: str) -> str:
    return (said or "-") if is_right else f"{said or 'none'}, not: {wanted or 'nothing'}"


def _wanted_culprit(injection: Injection) -> str:
    culprit = injection.fault.culprit
    return {"rank": f"rank {injection.rank}", "node": f"node{injection.node + 1}"}.get(culprit, culprit)


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def _brief(injection: Injection, verdict: Verdict) -> str:
    wrong = [
        name
        for name, is_right in (
            ("nothing said" if not injection.fault.is_harmless else "something said", verdict.is_right),
            (f"class {verdict.class_ or 'none'}", verdict.is_class_right),
            (f"culprit {verdict.culprit or 'none'}", verdict.is_culprit_right),
            (f"action {verdict.action or 'none'}", verdict.is_action_right),
        )
        if not is_right
    ]
    return f"{injection.key}: seen {_seconds(verdict.seen_s)} s; " + (
        "all right" if not wrong else f"wrong: {', '.join(wrong)}"
    )


def add_figures(figures: Figures, tried: Sequence[Tried]) -> None:
    """Shares of all, and of those that are held out apart."""
    if not tried:
        raise BenchError("none of these faults can be had here")
    figures.add("faults.tried", "faults", [len(tried)])
    ours = [(each.injection, each.ours) for each in tried if each.ours is not None]
    held_out = [each for each in ours if each[0].fault.is_held_out]
    for end, some in (("", ours), ("_held_out", held_out)):
        harmful = [verdict for injection, verdict in some if not injection.fault.is_harmless]
        if some:
            _share(figures, f"faults.seen_share{end}", [verdict.is_right for _, verdict in some])
        if harmful:
            _share(figures, f"faults.class_right_share{end}", [each.is_class_right for each in harmful])
            _share(figures, f"faults.culprit_right_share{end}", [each.is_culprit_right for each in harmful])
            _share(figures, f"faults.action_right_share{end}", [each.is_action_right for each in harmful])
    exits = [each.seen_s for injection, each in ours if is_exit(injection) and each.seen_s is not None]
    if exits:
        figures.add("faults.exit_detect_s", "s, the slowest", [max(exits)])
        figures.add("faults.exit_detect_median_s", "s", [median(exits)])
    hangs = [each for injection, each in ours if injection.fault.class_ == "hang"]
    if hangs:
        _share(figures, "faults.hang_detect_share", [each.is_in_time for each in hangs])
    if on := [each.goes_on_s for _, each in ours if each.goes_on_s is not None]:
        figures.add("faults.goes_on_s", "s", on)
    theirs = [
        each.torchruns for each in tried if each.torchruns is not None and not each.injection.fault.is_harmless
    ]
    if theirs:
        _share(figures, "faults.torchrun_seen_share", [each.seen_s is not None for each in theirs])
        _share(figures, "faults.torchrun_culprit_right_share", [each.is_culprit_right for each in theirs])
    if ours:
        left = sum(each.outcome.left for each in tried)
        figures.add("faults.left_processes", "processes of bootrun's runs", [left])


def _share(figures: Figures, name: str, right: Sequence[bool]) -> None:
    figures.add(name, "share", [sum(right) / len(right)])


def _known_flags() -> set[str]:
    helped = subprocess.run(
        [sys.executable, "-m", "launcher", "--help"], capture_output=True, text=True, check=True
    )
    return {word.strip(",=[]") for word in helped.stdout.split() if word.startswith(("--", "[--"))} | {"--nnodes"}
