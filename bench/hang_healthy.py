"""`python -m bench hang_healthy`: false alarms of the hang detector in healthy jobs, and how soon it finds hangs.

Jobs are made by chance from a printed seed on a virtual clock (bench/hang_jobs.py), looked at every 2 s. A hang is
found in time within max(15 s, 3 times the longest healthy gap before) and 1.5 s; where all spin, within 900 s.
What looks like a hang from outside (TRAPS) is counted apart: a figure about ordinary jobs would hide it.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from math import inf
from random import Random
from typing import NamedTuple

from bench.hang_jobs import CADENCES_S, HANGS, LOOK_S, TRAPS, Job, Plan, draw_plan, tame
from bench.record import Figures, Target
from launcher.base.facts import Hang, HangKind
from launcher.monitor.hang.detector import HangDetector
from launcher.monitor.hang.settings import HangSettings

ROUNDS = 1
LATE_S = 1.5  # what looks every 2 s and late reports of nodes add here; near a limit nodes look every 0.5 s
KINDS = {
    "all-idle": HangKind.ALL_IDLE,
    "one-idle": HangKind.ONE_APART,
    "one-busy": HangKind.ONE_APART,
    "frozen": HangKind.FROZEN,
    "stuck": HangKind.STUCK_IN_KERNEL,
    "all-busy": HangKind.ALL_BUSY,
}
TARGETS = {
    "false alarms in 1,000 h": Target(at_most=1.0),
    "hangs found in time": Target(at_least=0.99),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this bench."""
    parser.add_argument("--hours", type=float, default=1000.0, help="of healthy jobs")
    parser.add_argument(
        "--trap-hours", type=float, default=20.0, help="of each sort of job that looks like a hang"
    )
    parser.add_argument("--hangs", type=int, default=40, help="of each kind in each cadence")
    parser.add_argument("--seed", type=int, default=1)


def run(args: argparse.Namespace) -> Figures:
    """The bench."""
    print(f"seed {args.seed}; a look every {LOOK_S:g} s")
    figures = Figures()
    false, hours = 0, 0.0
    for step_s in CADENCES_S:
        alarms, watched_h, took_s = healthy(args.seed, step_s, args.hours / len(CADENCES_S))
        false, hours = false + len(alarms), hours + watched_h
        kinds = dict(Counter(hang.kind.value for hang, _ in alarms))
        print(
            f"steps of {step_s:g} s: {len(alarms)} false alarms in {watched_h:.0f} h {kinds or ''} {took_s:.0f} s"
        )
        for hang, plan in alarms[:5]:
            print(f"    {hang.kind.value} {hang.ranks}: {hang.why}\n      {_brief(plan)}")
    figures.add("false alarms in 1,000 h", "", [1000 * false / hours])
    in_time: list[bool] = []
    for step_s in CADENCES_S:
        for kind in HANGS:
            found = [hang_once(args.seed * 1000 + index, step_s, kind) for index in range(args.hangs)]
            delays = sorted(each.delay_s for each in found if each.delay_s is not None)
            met = [each.in_time for each in found]
            if kind != "all-busy":
                in_time += met
            middle = f"{delays[len(delays) // 2]:.0f}" if delays else "-"
            print(
                f"steps of {step_s:g} s, {kind}: found {len(delays)} of {len(found)}, in time {sum(met)}, "
                f"kind right {sum(each.right_kind for each in found)}, "
                f"rank right {sum(each.right_rank for each in found)}, "
                f"false before {sum(each.false_before for each in found)}; "
                f"after {middle} s (median), {delays[-1] if delays else 0:.0f} s (most)"
            )
            if delays:
                figures.add(f"{kind}, steps of {step_s:g} s", "s", delays)
    figures.add("hangs found in time", "", [sum(in_time) / max(1, len(in_time))])
    for trap in TRAPS:
        alarms, watched_h, _ = healthy(args.seed, 2.0, args.trap_hours, trap)
        kinds = dict(Counter(hang.kind.value for hang, _ in alarms))
        print(f"{trap}: {len(alarms)} false alarms in {watched_h:.0f} h {kinds or ''}")
    return figures


def healthy(
    seed: int, step_s: float, hours: float, trap: str = ""
) -> tuple[list[tuple[Hang, Plan]], float, float]:
    """What was wrongly told of healthy jobs; how many hours of them; how long that took in seconds."""
    random = Random(f"{seed} {step_s} {trap}")
    began_s = time.perf_counter()
    alarms: list[tuple[Hang, Plan]] = []
    watched_s = 0.0
    while watched_s < hours * 3600:
        plan = draw_plan(random, step_s, trap=trap)
        job_s = min(random.uniform(1200, 14400), hours * 3600 - watched_s + 600)
        detector = HangDetector(plan.world, HangSettings())
        attempt_s = 0.0
        # A job of one or two attempts; the second one resumes.
        for part_s in (job_s, job_s / 3)[: random.choice((1, 2))]:
            alarms += [(hang, plan) for hang in watch(detector, Job(plan, random), attempt_s, part_s)]
            attempt_s += part_s + 300
            detector.new_attempt(attempt_s)
            watched_s += part_s
    return alarms, watched_s / 3600, time.perf_counter() - began_s


def watch(detector: HangDetector, job: Job, from_s: float, for_s: float) -> list[Hang]:
    """Looks at a healthy attempt, and at its end."""
    found, now_s, ended = [], 0.0, 0
    finishing = False
    while now_s < for_s + 200:
        now_s += LOOK_S
        if now_s > for_s and not finishing:
            job.finish(now_s)
            finishing = True
        facts = job.look(now_s)
        for rank in job.ended[ended:] if len(job.ended) > ended else ():
            detector.ended(rank)
        ended = len(job.ended)
        if from_s:
            facts = [
                each._replace(
                    at_s=each.at_s + from_s, step_at_s=each.step_at_s + from_s if each.steps > 0 else -1.0
                )
                for each in facts
            ]
        hang = detector.look(facts, now_s + from_s)
        # What is early is told only when stacks say who is waited for; here there are none.
        if hang is not None and not hang.is_early:
            found.append(hang)
    return found


class Found(NamedTuple):
    """What came of a job that hangs."""

    delay_s: float | None  # None: it was not found
    in_time: bool
    right_kind: bool
    right_rank: bool
    false_before: bool


def hang_once(
    seed: int,
    step_s: float,
    kind: str,
    world: int | None = None,
    max_after_s: float = 1800.0,
    tamed: bool = False,
) -> Found:
    """A job that hangs, until that is told or much time has passed."""
    random = Random(f"{seed} {step_s} {kind}")
    plan = draw_plan(random, step_s, world)._replace(very_late=False)
    while not plan.counted:
        plan = draw_plan(random, step_s, world)._replace(very_late=False)
    if tamed:
        plan = tame(plan)
    job = Job(plan, random, kind, random.uniform(0, max_after_s))
    detector = HangDetector(plan.world)
    now_s, until_s, false = 0.0, inf, False
    while now_s < until_s:
        now_s += LOOK_S
        hang = detector.look(job.look(now_s), now_s)
        hanging = job.hanging
        if hanging is not None:
            until_s = hanging.at_s + 20000
        if hang is None or hang.is_early:
            continue
        if hanging is None or now_s < hanging.at_s:
            false = True
            continue
        delay_s = now_s - hanging.at_s
        # A stopped process is seen so at three looks.
        limit_s = max(15.0, 3 * hanging.longest_s) if kind != "frozen" else 5.0 + LOOK_S
        if kind == "all-busy":
            limit_s = max(900.0, limit_s)
        named = hang.ranks == ((hanging.rank,) if hanging.rank >= 0 else ())
        late_s = 2 * LOOK_S if kind == "frozen" else LATE_S
        return Found(delay_s, delay_s <= limit_s + late_s, hang.kind is KINDS[kind], named, false)
    return Found(None, False, False, False, false)


def _brief(plan: Plan) -> str:
    left_out = {"cores", "io_bps", "noise_cores", "noise_bps", "lags_s"}
    told = ", ".join(f"{name} {value}" for name, value in plan._asdict().items() if name not in left_out)
    return f"{told}, cores {plan.cores[0]:.2f}, io {plan.io_bps[0]:.0f}"
