"""The `bootseer` command and its groups; `run` (= bootrun) is handled before this file is imported.

Each command group of the library can be imported without the launcher.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from launcher.cli.groups import EXAMPLES, GROUPS, Group


def main(argv: list[str]) -> int:
    """Run a command group; return the exit status."""
    if argv and argv[0] in GROUPS:
        return _run_group(GROUPS[argv[0]], argv[1:])
    if argv and argv[0] == "warm":
        from launcher.warm.command import main as warm

        return warm(argv[1:])
    if argv and argv[0] == "status":
        from launcher.status.command import main as status

        return status(argv[1:])
    if argv and argv[0] == "serve":
        from launcher.serve.command import main as serve

        return serve(argv[1:])
    if argv and argv[0] == "completion":
        from launcher.completion import main as completion

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
    groups.add_parser("run", help="Launch a job on this node: the same as bootrun", add_help=False)
    groups.add_parser("warm", help="Warm this node's caches before a job starts", add_help=False)
    groups.add_parser("status", help="Show the running jobs of this user on this node", add_help=False)
    groups.add_parser("serve", help="Serve a page, an API and metrics about the running jobs", add_help=False)
    groups.add_parser("completion", help="Print the shell completion of bootrun and bootseer", add_help=False)
    if argv and not argv[0].startswith("-") and argv[0] not in groups.choices:
        import difflib

        near = difflib.get_close_matches(argv[0], groups.choices, 1)
        known = f"did you mean {near[0]}?" if near else f"choose from {', '.join(groups.choices)}"
        print(f"bootseer: error: unknown command {argv[0][:80]!r}: {known}", file=sys.stderr)
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
            raise  # an internal error, which no installation fixes
        print(f"bootseer: error: {error.name} is missing: pip install 'bootseer[{group.extra}]'", file=sys.stderr)
        return 1
    status: int = module.main(argv)
    return status
