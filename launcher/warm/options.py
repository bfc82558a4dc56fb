"""The command line of `bootseer warm`: bootrun's, so that a job is named as it is started, and some flags more."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.errors import UsageError
from launcher.cli import get_args_parser
from launcher.spec import parse_size
from launcher.warm.results import STAGES

EVERY_S = 300.0
_NO_SCRIPT = "-"  # stands for one that nobody named
DESCRIPTION = "Fills this node's caches for a job before the job is there, so that its start finds what it needs."
EPILOG = """\
examples:
  bootseer warm --image hdfs://namenode/images/train-v3 train.py
  bootseer warm --setup "pip install -r requirements.txt" --setup-input requirements.txt \\
                --env-store hdfs://namenode/environments train.py
  bootseer warm                                   for the job of ./bootseer.toml
  bootseer warm --hold 600 --load-checkpoint hdfs://namenode/run1 train.py &
  bootseer warm --jobs /etc/bootseer/jobs --rate 200MB
  bootseer warm --status

The flags that say what the job needs are bootrun's (bootrun --help), also in bootseer.toml and as variables. What
is there already is not fetched again. As root a daemon warms each file of --jobs as the user who owns it.
Exit status: 0; 1 when something could not be warmed (the job starts all the same, and fetches it itself); 2 for a
wrong command line.
"""


class Options(NamedTuple):
    """Of `bootseer warm` alone."""

    jobs: str  # folder of job files, "" for the job of the command line
    every_s: float  # between two rounds over them
    is_once: bool
    only: tuple[str, ...]  # of STAGES
    most_bytes_per_s: float | None
    most_bytes: int | None  # that a stage may fetch
    hold_s: float  # so long a checkpoint is held in memory
    shows_status: bool
    as_json: bool


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Options, argparse.Namespace]:
    """The options, and what is bootrun's; its script is "-" where none is named.

    Ends the process as argparse does when the command line is wrong (status 2) or asks for help.
    Raises: UsageError.
    """
    args = make_parser(environ).parse_args(argv)
    has_job = args.training_script is not None
    if args.jobs is not None and has_job:
        raise UsageError("--jobs and a script: give one of them")
    if args.once and args.jobs is None:
        raise UsageError("--once is without effect: it belongs to --jobs")
    if not math.isfinite(args.every) or args.every < 1:
        raise UsageError(f"--every {args.every:g}: give seconds, 1 or more")
    if not math.isfinite(args.hold) or args.hold < 0:
        raise UsageError(f"--hold {args.hold:g}: give seconds, 0 or more")
    if args.hold and args.once:
        raise UsageError("--hold and --once: what is held in memory goes with this process: give one of them")
    if not has_job:
        args.training_script, args.training_script_args = _NO_SCRIPT, []
    args.nproc_per_node = "1"  # devices are not looked for: there may be none yet
    rate = _size(args.rate, "--rate")
    options = Options(
        jobs=args.jobs or "",
        every_s=args.every,
        is_once=args.once,
        only=_only(args.only),
        most_bytes_per_s=None if rate is None else float(rate),
        most_bytes=_size(args.most, "--most"),
        hold_s=args.hold,
        shows_status=args.status,
        as_json=args.json,
    )
    return options, args


def is_named(script: str) -> bool:
    """Whether it is known what will be run."""
    return script != _NO_SCRIPT


def make_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """bootrun's with the flags of warming; `environ` gives the defaults."""
    parser = get_args_parser(environ, "bootseer warm", needs_script=False)
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    own = parser.add_argument_group("warming (never abbreviated)")
    own.add_argument(
        "--jobs", metavar="DIR", help="stay, and keep this node warm for the job files (*.toml) in DIR"
    )
    own.add_argument(
        "--every", type=float, default=EVERY_S, metavar="S", help="between two rounds over them (default 300)"
    )
    own.add_argument("--once", action="store_true", help="one round over --jobs, then end")
    own.add_argument("--only", metavar="STAGE,...", help=f"of {', '.join(STAGES)} (default: all that the job has)")
    own.add_argument("--rate", metavar="SIZE", help="bytes a second from stores, as 200MB (default: no limit)")
    own.add_argument(
        "--most", metavar="SIZE", help="what would fetch more is left out, as 20GB (default: no limit)"
    )
    own.add_argument(
        "--hold",
        type=float,
        default=0.0,
        metavar="S",
        help="hold the checkpoint in memory until a job takes it, at most so long (default: it is not loaded)",
    )
    own.add_argument("--status", action="store_true", help="what the daemon of this user did last")
    own.add_argument("--json", action="store_true", help="the result as JSON on stdout")
    parser.own |= {"--jobs", "--every", "--once", "--only", "--rate", "--most", "--hold", "--status", "--json"}
    return parser


def _only(text: str | None) -> tuple[str, ...]:
    if text is None:
        return STAGES
    found = tuple(dict.fromkeys(text.split(",")))
    for each in found:
        if each not in STAGES:
            raise UsageError(f"--only {each!r}: there are {', '.join(STAGES)}")
    return found


def _size(text: str | None, flag: str) -> int | None:
    found = parse_size(text, flag)
    if found == 0:
        raise UsageError(f"{flag} {text}: give more than 0")
    return found
