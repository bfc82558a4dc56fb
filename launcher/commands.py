"""The `bootseer` command: its groups, of which `run` (= bootrun) is taken before this file is imported.

Groups of the library register here as they come to exist; each stays importable without the launcher.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from typing import NamedTuple

EXAMPLES = """\
examples:
  bootseer run --standalone --nproc-per-node 8 train.py     the same as: bootrun ...
  bootseer ckpt ls hdfs://namenode/run1/ckpt                which checkpoint a job would load
  bootseer image build docker://python:3.11 /data/python    an image as a tree, which starts before it is there
  bootseer env list --env-store hdfs://namenode/envs        environments that jobs need not install
  bootseer warm --image hdfs://namenode/images/train-v3     what a job will need, on this node before it is there
  bootseer report /logs/run1 --html run1.html               where the time of a start went, as text and as a page
  bootseer replay --hosts hosts.txt --group-size 4 --run "srun ..."    which machine makes the job fail
  bootseer check --path /data --expect-gpus 8               whether this node is fit for a job
  bootseer status --watch                                   the jobs that run here: ranks, steps, restarts
  bootseer keys make                                        a key to sign what this user publishes
  bootseer --version
"""


class Group(NamedTuple):
    """Commands of the library."""

    module: str  # its `main` takes arguments and returns the exit status
    extra: str  # what has to be installed for it
    help: str


GROUPS = {
    "ckpt": Group("bootseer.cli.ckpt", "checkpoint", "checkpoints: stripe, list, verify, prefetch, mount"),
    "image": Group(
        "bootseer.cli.image", "image", "images as trees: build, push, pull, mount, run, prefetch, unpack"
    ),
    "env": Group("bootseer.cli.env", "env", "environments: set up once, restored everywhere; first-step caches"),
    "keys": Group("bootseer.cli.keys", "image", "keys: who may publish what this user runs"),
    "replay": Group("bootseer.cli.replay", "report", "find the machine at fault, by a job on groups of machines"),
    "report": Group(
        "bootseer.cli.report", "report", "where the time of a start went; two compared; many summed up"
    ),
    "check": Group(
        "bootseer.cli.check", "check", "whether this node is fit for a job, by its disks, network, devices"
    ),
}


def main(argv: list[str]) -> int:
    """Runs a command group; returns the exit status."""
    if argv and argv[0] in GROUPS:
        return _run_group(GROUPS[argv[0]], argv[1:])
    if argv and argv[0] == "warm":
        from launcher.warm.command import main as warm

        return warm(argv[1:])
    if argv and argv[0] == "status":
        from launcher.status.command import main as status

        return status(argv[1:])
    if argv and argv[0] == "completion":
        from launcher.manual import main as completion

        return completion(argv[1:])
    from bootseer import __version__

    parser = argparse.ArgumentParser(
        prog="bootseer",
        description="Start training jobs fast and keep them running.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bootseer {__version__}")
    groups = parser.add_subparsers(dest="group", metavar="COMMAND")
    for name, group in GROUPS.items():
        groups.add_parser(name, help=group.help, add_help=False)
    groups.add_parser("run", help="launch a job on this node: the same as bootrun", add_help=False)
    groups.add_parser("warm", help="fill this node's caches for a job before the job is there", add_help=False)
    groups.add_parser("status", help="the jobs of this user that run on this node, live", add_help=False)
    groups.add_parser("completion", help="what a shell needs to complete bootrun and bootseer", add_help=False)
    if argv and not argv[0].startswith("-") and argv[0] not in groups.choices:
        import difflib

        near = difflib.get_close_matches(argv[0], groups.choices, 1)
        known = f"did you mean {near[0]}?" if near else f"there are {', '.join(groups.choices)}"
        print(f"bootseer: error: there is no command {argv[0][:80]!r}: {known}", file=sys.stderr)
        return 2
    args = parser.parse_args(argv)
    if args.group is None:
        parser.print_help(sys.stderr)
        return 2
    return 0


def _run_group(group: Group, argv: list[str]) -> int:
    try:
        module = importlib.import_module(group.module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("bootseer", "launcher"):
            raise  # a mistake of ours, which no installation mends
        print(f"bootseer: error: {error.name} is missing: pip install 'bootseer[{group.extra}]'", file=sys.stderr)
        return 1
    status: int = module.main(argv)
    return status
