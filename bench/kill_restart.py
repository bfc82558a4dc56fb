"""`python -m bench kill_restart`: SIGKILL of bootrun, guard, coordinator, preloaded process, in restarts of a job.

A training on two nodes with four ranks, forked, on gloo. A rank fails; at a moment of the restart (some with a
post-mortem command, checks of the nodes and of the network between them), or of the time before or after, one
process is killed. Within 30 s the job has to make steps again with all ranks of its world, or every launcher that
is left has to end with an error that names what died and where. Then nothing may be left: no process, socket, name
in /dev/shm, cgroup, mount, temporary or runtime file. --rounds is the number of kills.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Sequence

from bench.kill_restart_job import Came, try_kill
from bench.kill_restart_plan import ENDED, UNCLEAR, WENT_ON, draw
from bench.kill_restart_plan import TARGETS as KILLED
from bench.record import BenchError, Figures, Target, note

ROUNDS = 50
TARGETS = {
    "kill_restart.kills": Target(at_least=50),
    "kill_restart.unclear": Target(at_most=0),
    "kill_restart.ended_needlessly": Target(at_most=0),
    "kill_restart.left": Target(at_most=0),
    "kill_restart.broken": Target(at_most=0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of this bench."""
    parser.add_argument("--seed", type=int, default=None, help="of moments and processes (printed; default: new)")
    parser.add_argument("--only", action="append", choices=KILLED, help="kill this one; can be repeated")
    parser.add_argument("--number", type=int, help="only this kill of the seed")
    parser.add_argument("--bare", action="store_true", help="ranks without torch, over sockets")
    parser.add_argument("--keep", metavar="DIR", help="keep what was said in this folder")


def table(came: Sequence[Came]) -> list[str]:
    """A row for each target: how many times what came of it."""
    rows: list[tuple[str, ...]] = [("killed", "times", WENT_ON, ENDED, UNCLEAR, "left something", "slowest s")]
    for target in KILLED:
        some = [each for each in came if each.kill.target == target]
        if some:
            counts = [sum(each.verdict == verdict for each in some) for verdict in (WENT_ON, ENDED, UNCLEAR)]
            left = sum(bool(each.left) for each in some)
            slowest = f"{max(each.seconds for each in some):.1f}"
            rows.append((target, str(len(some)), *map(str, counts), str(left), slowest))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def run(args: argparse.Namespace) -> Figures:
    """`args.rounds` kills, one job each."""
    seed = args.seed if args.seed is not None else int.from_bytes(os.urandom(4), "little")
    note(f"seed {seed}")
    kind = "bare" if args.bare else "torch"
    came: list[Came] = []
    broken = 0
    kills = [k for k in draw(seed, args.rounds, args.only or KILLED) if args.number in (None, k.number)]
    if not kills:
        raise BenchError(f"--number {args.number}: there are kills 0 to {args.rounds - 1}")
    with tempfile.TemporaryDirectory(prefix="bench-kills-") as cache:
        for kill in kills:
            directory = tempfile.mkdtemp(prefix="bench-kill-")
            try:
                came.append(try_kill(kill, kind, directory, cache))
            except BenchError as error:
                broken += 1
                note(f"no figure can be made of it: {error}")
                continue
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            tell(came[-1], args.keep)
    if not came:
        raise BenchError("none of these kills came to its moment")
    print("\n".join(table(came)))
    print(f"seed {seed}")
    figures = Figures()
    figures.add("kill_restart.kills", "kills", [len(came)])
    for name, verdict in (("went_on", WENT_ON), ("ended_clearly", ENDED), ("unclear", UNCLEAR)):
        figures.add(f"kill_restart.{name}", "kills", [sum(each.verdict == verdict for each in came)])
    needless = sum(each.verdict == ENDED and each.kill.must_go_on for each in came)
    figures.add("kill_restart.ended_needlessly", "kills", [needless])
    figures.add("kill_restart.left", "kills after which something was left", [sum(bool(c.left) for c in came)])
    figures.add("kill_restart.broken", "kills that did not come to their moment", [broken])
    for name, verdict in (("goes_on_s", WENT_ON), ("ends_s", ENDED)):
        if seconds := [each.seconds for each in came if each.verdict == verdict]:
            figures.add(f"kill_restart.{name}", "s", seconds)
    return figures


def tell(came: Came, keep: str | None) -> None:
    """A line for people; what was said where something is wrong."""
    is_right = not came.wrong and not came.left
    wrong = f"; WRONG: {came.wrong}" if came.wrong else ""
    left = f"; LEFT: {', '.join(came.left)}" if came.left else ""
    note(f"{came.kill}: {came.verdict} after {came.seconds:.1f} s{wrong}{left}")
    if keep:
        os.makedirs(keep, exist_ok=True)
        path = os.path.join(keep, f"{came.kill.number}{'' if is_right else '-wrong'}.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write(f"{came.kill}\n{came.verdict} {wrong}{left}\n{came.text}")
