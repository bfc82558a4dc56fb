"""Runs a group of commands: what is thrown becomes one line on stderr and an exit status (docs/errors.md)."""

from __future__ import annotations

import sys

import typer

from bootseer.errors import BootseerError


def run(app: typer.Typer, name: str, argv: list[str]) -> int:
    """Runs one command of the group called `name`; returns the exit status."""
    try:
        ended = app(args=argv, prog_name=name, standalone_mode=False)
    except typer.Abort:
        return 130
    except BrokenPipeError:
        return 141  # as of SIGPIPE: a reader of stdout has seen enough
    except BootseerError as error:
        print(f"bootseer: error: {error}", file=sys.stderr)
        return error.exit_status
    except Exception as error:
        show = getattr(error, "show", None)  # of the command line
        if show is None:
            raise
        show(file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    return ended if isinstance(ended, int) else 0  # of typer.Exit
