"""The command line of `bootseer warm`: bootrun's flags, so that a job is named as it is started, and some more."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from bootseer.errors import UsageError
from launcher.cli.parser import get_args_parser
from launcher.spec import parse_size
from launcher.warm.results import STAGES

EVERY_S = 300.0
_NO_SCRIPT = "-"  # if no script is given
DESCRIPTION = "Fetch the data of a job to this node's caches before the job starts."
EPILOG = """\
examples:
  bootseer warm --image hdfs://namenode/images/train-v3 train.py
  bootseer warm --setup "pip install -r requirements.txt" --setup-input requirements.txt \\
                --env-store hdfs://namenode/environments train.py
  bootseer warm                                   for the job of ./bootseer.toml
  bootseer warm --hold 600 --load-checkpoint hdfs://namenode/run1 train.py &
  bootseer warm --jobs /etc/bootseer/jobs --rate 200MB
  bootseer warm --status

The flags of the job are bootrun's (bootrun --help), also in bootseer.toml and as variables. Data that is present
is not fetched again. As root a daemon warms each file of --jobs as the user who owns it.
Exit status: 0; 1 if a stage failed (the job can still start, and fetches the data itself); 2 for a wrong command
line.
"""


class Options(NamedTuple):
    """Options of `bootseer warm` itself."""

    jobs: str  # directory of job files, "" for the job of the command line
    every_s: float  # between two rounds over the job files
    is_once: bool
    only: tuple[str, ...]  # of STAGES
    max_bytes_per_s: float | None
    max_bytes: int | None  # limit for each stage
    hold_s: float  # how long a checkpoint is held in memory
    shows_status: bool
    as_json: bool


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> tuple[Options, argparse.Namespace]:
    """Return the options, and the arguments of bootrun; their script is "-" if none is named.

    Ends the process as argparse does if the command line is wrong (status 2) or requests help.
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
        raise UsageError("--hold and --once: held memory ends with this process: give one of them")
    if not has_job:
        args.training_script, args.training_script_args = _NO_SCRIPT, []
    args.nproc_per_node = "1"  # devices are not counted: there may be none yet
    rate = _size(args.rate, "--rate")
    options = Options(
        jobs=args.jobs or "",
        every_s=args.every,
        is_once=args.once,
        only=_only(args.only),
        max_bytes_per_s=None if rate is None else float(rate),
        max_bytes=_size(args.most, "--most"),
        hold_s=args.hold,
        shows_status=args.status,
        as_json=args.json,
    )
    return options, args


def is_named(script: str) -> bool:
    return script != _NO_SCRIPT


def make_parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    """Return bootrun's parser with the flags of warming; `environ` gives the defaults."""
    parser = get_args_parser(environ, "bootseer warm", needs_script=False)
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    own = parser.add_argument_group("warming (never abbreviated)")
    own.add_argument(
        "--jobs", metavar="DIR", help="Run as a daemon that keeps this node warm for the job files (*.toml) in DIR"
    )
    own.add_argument(
        "--every",
        type=float,
        default=EVERY_S,
        metavar="S",
        help="Seconds between two rounds over the job files (default: 300)",
    )
    own.add_argument("--once", action="store_true", help="Run one round over --jobs, then exit")
    own.add_argument(
        "--only", metavar="STAGE,...", help=f"Stages to warm, of {', '.join(STAGES)} (default: all of the job)"
    )
    own.add_argument(
        "--rate", metavar="SIZE", help="Maximum bytes per second from stores, as 200MB (default: unlimited)"
    )
    own.add_argument(
        "--most",
        metavar="SIZE",
        help="Maximum bytes to fetch, as 20GB; larger stages are skipped (default: unlimited)",
    )
    own.add_argument(
        "--hold",
        type=float,
        default=0.0,
        metavar="S",
        help=("Seconds to hold the checkpoint in memory until a job takes it (default: do not load it)"),
    )
    own.add_argument("--status", action="store_true", help="Show the last results of this user's daemon")
    own.add_argument("--json", action="store_true", help="Print the result as JSON to stdout")
    parser.own |= {"--jobs", "--every", "--once", "--only", "--rate", "--most", "--hold", "--status", "--json"}
    return parser


def _only(text: str | None) -> tuple[str, ...]:
    if text is None:
        return STAGES
    found = tuple(dict.fromkeys(text.split(",")))
    for each in found:
        if each not in STAGES:
            raise UsageError(f"--only {each!r}: the values are {', '.join(STAGES)}")
    return found


def _size(text: str | None, flag: str) -> int | None:
    found = parse_size(text, flag)
    if found == 0:
        raise UsageError(f"{flag} {text}: give more than 0")
    return found
