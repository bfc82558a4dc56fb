"""Shell completions, generated from the parsers: `bootseer completion`.

They are text: a completion does not start Python at each key press. The library's commands use typer, bootrun's
use argparse. This module presents all of them as argparse parsers, which shtab reads (and `scripts/man.py`).
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from typing import Any

from launcher.cli.groups import EXAMPLES, GROUPS
from launcher.cli.parser import complete, get_args_parser
from launcher.serve.options import make_parser as serve_parser
from launcher.status.command import make_parser as status_parser
from launcher.warm.options import make_parser

SHELLS = ("bash", "zsh", "fish", "tcsh")
USAGE = """\
examples:
  bootseer completion bash > ~/.local/share/bash-completion/completions/bootrun
  source <(bootseer completion bash)          in ~/.bashrc: bootrun and bootseer
  bootseer completion zsh > ~/.zfunc/_bootrun with fpath+=~/.zfunc before compinit
  bootseer completion fish > ~/.config/fish/completions/bootrun.fish
"""


def main(argv: list[str]) -> int:
    """Run `bootseer completion SHELL`. Returns: the exit status."""
    args = _own_parser().parse_args(argv)
    try:
        wanted = [made for name, made in parsers().items() if args.program in (None, name)]
        text = "".join(complete(made, args.shell) for made in wanted)
    except ModuleNotFoundError:
        print("bootseer: error: shtab is missing: pip install 'bootseer[completion]'", file=sys.stderr)
        return 1
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _own_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bootseer completion",
        description="Print a shell script that completes the commands and flags of bootrun and bootseer.",
        epilog=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=SHELLS, help="Shell to complete in")
    parser.add_argument(
        "--program", choices=("bootrun", "bootseer"), help="Complete only this program (default: both)"
    )
    return parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of both programs, by name, without commands that are not installed."""
    bootrun = get_args_parser({}, "bootrun", needs_script=False)
    bootseer = argparse.ArgumentParser(
        prog="bootseer",
        description="Start training jobs fast and keep them running.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bootseer.add_argument("--version", action="store_true", help="Print the version and end")
    groups = bootseer.add_subparsers(dest="group", metavar="COMMAND")
    run = get_args_parser({}, "bootseer run", needs_script=False)
    groups.add_parser("run", parents=[run], add_help=False, conflict_handler="resolve", help="the same as bootrun")
    warm = make_parser({})
    groups.add_parser("warm", parents=[warm], add_help=False, conflict_handler="resolve", help=warm.description)
    status = status_parser()
    groups.add_parser(
        "status", parents=[status], add_help=False, conflict_handler="resolve", help=status.description
    )
    serve = serve_parser()
    groups.add_parser("serve", parents=[serve], add_help=False, conflict_handler="resolve", help=serve.description)
    own = _own_parser()
    groups.add_parser(
        "completion", parents=[own], add_help=False, conflict_handler="resolve", help=own.description
    )
    for name, group in GROUPS.items():
        try:
            app = importlib.import_module(group.module).app
        except ModuleNotFoundError:
            continue
        import typer.main

        _add(groups, name, typer.main.get_command(app), group.help)
    return {"bootrun": bootrun, "bootseer": bootseer}


def _add(above: Any, name: str, command: Any, text: str) -> None:
    """Add a typer command and all its subcommands as argparse parsers."""
    epilog = (command.epilog or "").replace("\b", "")
    parser = above.add_parser(
        name,
        help=text.replace("%", "%%"),
        description=(command.help or text).replace("\b", "").replace("%", "%%"),
        epilog=epilog.replace("%", "%%"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for each in command.params:
        _add_parameter(parser, each)
    below: dict[str, Any] = getattr(command, "commands", {})
    if below:
        commands = parser.add_subparsers(dest=f"{name}_command", metavar="COMMAND")
        for other, each_command in below.items():
            if not each_command.hidden:
                _add(commands, other, each_command, each_command.get_short_help_str(100))


def _add_parameter(parser: argparse.ArgumentParser, parameter: Any) -> None:
    choices = getattr(parameter.type, "choices", None)
    text = str(getattr(parameter, "help", None) or "").replace("%", "%%")
    names = [name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("-")]
    if not names:
        nargs = "*" if parameter.nargs < 0 else None if parameter.required else "?"
        metavar = parameter.metavar or (parameter.name or "").upper()
        parser.add_argument(parameter.name or "", nargs=nargs, choices=choices, metavar=metavar, help=text)
    elif names != ["--help"]:
        if getattr(parameter, "is_flag", False):
            parser.add_argument(*names, dest=parameter.name, action="store_true", help=text)
        else:
            metavar = parameter.metavar or (parameter.name or "").upper()
            parser.add_argument(*names, dest=parameter.name, choices=choices, metavar=metavar, help=text)
