"""`bootseer status`: the running jobs of this user on this node."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from bootseer.errors import BootseerError
from launcher.status.places import JobStatus, ask_all
from launcher.status.text import format_status

NAME = "bootseer status"
EVERY_S = 2.0
NONE_RUNS = 1  # exit status
EXAMPLES = """\
examples:
  bootseer status                      all jobs of this user on this node
  bootseer status run7 --watch         one job, by its id (or a prefix of it) or bootrun's pid, every 2 s
  bootseer status --watch=10           every 10 s, until no job runs
  bootseer status --json | jq '.jobs[0].ranks[] | {rank, step, steps_per_s}'
exit status: 0; 1 if no such job runs; 2 for a wrong command line
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Show the running jobs of this user on this node: ranks, steps, restarts, what they wait for.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="Job to show: its id, the first letters of the id, or the pid of bootrun",
    )
    parser.add_argument("--json", action="store_true", help="Print one line of JSON with all details")
    parser.add_argument(
        "--watch",
        nargs="?",
        type=_seconds,
        const=EVERY_S,
        metavar="S",
        help=f"Wait for such a job, and show it every S seconds until none runs (default: {EVERY_S:g})",
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command; return the exit status."""
    args = make_parser().parse_args(argv)
    try:
        if args.watch is None:
            return _show(args.job, args.json, "")
        return _watch(args.job, args.json, args.watch)
    except BootseerError as error:
        print(f"{NAME}: error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.1 <= found <= 86400:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: give 0.1 to 86400 seconds, and the job before --watch")
    return found


def _watch(job: str | None, as_json: bool, every_s: float) -> int:
    clear = "\x1b[H\x1b[J" if sys.stdout.isatty() and not as_json else ""
    has_waited = False
    while not (found := choose(ask_all(os.environ), job)):
        if not has_waited:
            has_waited = True
            which = "a job of this user" if job is None else f"job {job[:80]}"
            print(f"{NAME}: waiting for {which} on this node (Ctrl-C ends this)", file=sys.stderr)
        time.sleep(every_s)
    while found:
        _print(found, as_json, clear)
        time.sleep(every_s)
        found = choose(ask_all(os.environ), job)
    print(f"{NAME}: the job has ended", file=sys.stderr)
    return 0


def _show(job: str | None, as_json: bool, clear: str) -> int:
    every = ask_all(os.environ)
    found = choose(every, job)
    if found or as_json:
        _print(found, as_json, clear)
    if found:
        return 0
    if job is None:
        print(f"{NAME}: no job of this user runs on this node (a job appears after 2 s)", file=sys.stderr)
    else:
        others = ", ".join(
            str(each.status.get("run_id", "?"))[:80]
            if each.status is not None
            else f"one without an answer ({each.why})"
            for each in every[:8]
        )
        print(f"{NAME}: no job {job[:80]!r} runs here; running: {others or 'none'}", file=sys.stderr)
    return NONE_RUNS


def choose(found: Sequence[JobStatus], job: str | None) -> list[JobStatus]:
    """Return the jobs with this id, else with this pid, else whose id has this prefix; all for None."""
    if job is None:
        return list(found)
    ids = [(each, str((each.status or {}).get("run_id", ""))) for each in found]
    by_pid = [each for each in found if each.status is not None and str(each.status.get("pid")) == job]
    by_id = [each for each, name in ids if name == job]
    return by_id or by_pid or [each for each, name in ids if name.startswith(job)]


def _print(found: Sequence[JobStatus], as_json: bool, clear: str) -> None:
    if as_json:
        jobs = [each.status if each.status is not None else {"error": each.why} for each in found]
        text = json.dumps({"jobs": jobs})
    else:
        blocks = [
            "\n".join(format_status(each.status)) if each.status is not None else f"job at {each.path}: {each.why}"
            for each in found
        ]
        text = "\n\n".join(blocks)
    sys.stdout.write(f"{clear}{text}\n")
    sys.stdout.flush()
