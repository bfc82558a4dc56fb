"""The `bootseer` command: its groups, of which `run` (= bootrun) is taken before this file is imported.

Groups of the library register here as they come to exist; each stays importable without the launcher.
"""

from __future__ import annotations

import argparse
import sys

EXAMPLES = """\
examples:
  bootseer run --standalone --nproc-per-node 8 train.py     the same as: bootrun ...
  bootseer --version
"""


def main(argv: list[str]) -> int:
    """Runs a command group; returns the exit status."""
    from bootseer import __version__

    parser = argparse.ArgumentParser(
        prog="bootseer",
        description="Start training jobs fast and keep them running.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"bootseer {__version__}")
    groups = parser.add_subparsers(dest="group", metavar="COMMAND")
    groups.add_parser("run", help="launch a job on this node: the same as bootrun", add_help=False)
    args = parser.parse_args(argv)
    if args.group is None:
        parser.print_help(sys.stderr)
        return 2
    return 0
