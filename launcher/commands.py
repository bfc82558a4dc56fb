"""The `bootseer` command: its groups, of which `run` (= bootrun) is taken before this file is imported.

Groups of the library register here as they come to exist; each stays importable without the launcher.
"""

from __future__ import annotations

import argparse
import sys

EXAMPLES = """\
examples:
  bootseer run --standalone --nproc-per-node 8 train.py     the same as: bootrun ...
  bootseer ckpt ls hdfs://namenode/run1/ckpt                which checkpoint a job would load
  bootseer --version
"""


def main(argv: list[str]) -> int:
    """Runs a command group; returns the exit status."""
    if argv and argv[0] == "ckpt":
        return _checkpoint(argv[1:])
    from bootseer import __version__

    parser = argparse.ArgumentParser(
        prog="bootseer",
        description="Start training jobs fast and keep them running.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bootseer {__version__}")
    groups = parser.add_subparsers(dest="group", metavar="COMMAND")
    groups.add_parser("ckpt", help="checkpoints: stripe, list, verify, prefetch, mount", add_help=False)
    groups.add_parser("run", help="launch a job on this node: the same as bootrun", add_help=False)
    args = parser.parse_args(argv)
    if args.group is None:
        parser.print_help(sys.stderr)
        return 2
    return 0


def _checkpoint(argv: list[str]) -> int:
    try:
        from bootseer.cli.ckpt import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("bootseer", "launcher"):
            raise  # a mistake of ours, which no installation mends
        print(f"bootseer: error: {error.name} is missing: pip install 'bootseer[checkpoint]'", file=sys.stderr)
        return 1
    return run(argv)
