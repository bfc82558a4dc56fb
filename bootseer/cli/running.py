"""Groups of commands: their common settings, and how one is run.

Each exception becomes one line on stderr and an exit status (docs/reference/errors.md).
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from bootseer.errors import BootseerError

_ANY_LENGTH = 1 << 16


class _Group(TyperGroup):
    """A group whose help shows the whole first sentence of each command, on several lines if needed."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        found = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [(name, each.get_short_help_str(_ANY_LENGTH)) for name, each in found if each and not each.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def new_app(name: str = "", text: str = "") -> typer.Typer:
    """Create a group of commands with the settings of all `bootseer` commands."""
    return typer.Typer(
        name=name or None,
        cls=_Group,
        help=text,
        no_args_is_help=True,
        context_settings={"help_option_names": ["-h", "--help"]},
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
    )


def run(app: typer.Typer, name: str, argv: list[str], *, logs: bool = False) -> int:
    """Run one command of the group `name` and return the exit status. Args: logs: it logs, to stderr."""
    if logs:
        from bootseer.cli.image_words import print_message
        from bootseer.logs import sent_to

        with sent_to(print_message):
            return run(app, name, argv)
    try:
        ended = app(args=argv, prog_name=name, standalone_mode=False)
    except typer.Abort:
        return 130
    except BrokenPipeError:
        return 141  # as after SIGPIPE: the reader of stdout has closed it
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
