"""The command line of bootrun: argparse over the table of flags.py, with torchrun's semantics.

Prefixes of torchrun's flags are accepted exactly as torchrun accepts them. Bootseer's own flags match only in
full, so that a new one can never make a prefix ambiguous. Arguments after the script belong to the script.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from bootseer.errors import UsageError
from bootseer.light_typing import Any, NoReturn
from launcher.cli.flags import FLAGS, Flag, is_on

DESCRIPTION = "Launch the ranks of a training job on this node; accepts torchrun's flags and variables."
EPILOG = """\
examples:
  bootrun --standalone --nproc-per-node 8 train.py --lr 3e-4
  bootrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint head:29400 --rdzv-id job7 train.py
  bootrun --nnodes 2:4 --max-restarts 3 --tee 3 --log-dir logs --rdzv-backend c10d --rdzv-endpoint head train.py
  bootrun --standalone --nproc-per-node 2 --no-python ./run.sh '${local_rank}'

Defaults come from PET_<FLAG> variables (Bootseer's flags: BOOTSEER_<FLAG>); the command line takes precedence.
Set a job secret (BOOTSEER_SECRET_FILE) to keep other hosts out of a job with several nodes. Exit status: 0, 1 if
ranks failed or where torchrun refuses a value with 1, 2 for other mistakes in the command line, 128+n if signal n
stopped the job (torchrun: 1).

Differences from torchrun (docs/reference/torchrun.md lists all): --shutdown-timeout applies to every stop;
--node-rank also applies to c10d; --max-restarts is one budget for the whole job; masks accept ranks with several
digits; ranks see TORCHELASTIC_USE_AGENT_STORE=False, as rank 0 hosts the store; a failed start is retried after a
pause; etcd and third-party logs specs are not supported.
"""


# Groups of Bootseer's flags: each title precedes the flag that begins its group.
TITLES = {
    "rank_hooks": "ranks (Bootseer's flags, never abbreviated)",
    "image": "image",
    "load_checkpoint": "checkpoint",
    "peers": "peer sharing",
    "setup": "environment",
    "keep_caches": "compile caches",
    "config": "the job",
}


FILES_TOO = "complete -o bashdefault -o default -F"


class Parser(argparse.ArgumentParser):
    """A parser that matches Bootseer's own flags only in full."""

    own: frozenset[str] = frozenset()

    def error(self, message: str) -> NoReturn:
        """Print one line, without the usage that argparse prints before it, and exit."""
        if message.endswith(("required: script, ...", "required: script")):  # the second is that of Python 3.13
            message = "no script given"
        elif message.startswith("unrecognized arguments: "):
            message += self._suggest(message.split()[2])
        self.exit(UsageError.exit_status, f"{self.prog}: error: {message}; see {self.prog} --help\n")

    def _suggest(self, word: str) -> str:
        """Return a suggestion for an unknown flag."""
        from difflib import get_close_matches

        known = [name for name in self._option_string_actions if name.startswith("--")]
        found = get_close_matches(word.partition("=")[0], known, 1, 0.75)
        return f"; did you mean {found[0]}?" if found else ""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        found: list[Any] = super()._get_option_tuples(option_string)
        return [each for each in found if each[1] not in self.own]


def get_args_parser(
    environ: Mapping[str, str] | None = None, prog: str = "bootrun", *, needs_script: bool = True
) -> Parser:
    """Return the parser; `environ` gives the defaults. Without `needs_script` a missing script is None."""
    environ = os.environ if environ is None else environ
    words = "script [arguments of the script]" if needs_script else "[script [arguments of the script]]"
    parser = Parser(
        prog=prog,
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=_make_formatter,
        usage=f"{prog} [flags] {words}",
    )
    parser.own = frozenset(name for flag in FLAGS if flag.ours for name in flag.spellings) | {"--version"}
    group = parser.add_argument_group("torchrun's flags")
    for flag in FLAGS:
        title = TITLES.get(flag.dest)
        if title is not None:
            group = parser.add_argument_group(title)
        _add(group, flag, environ.get(flag.env) if flag.env else None)
    group.add_argument(
        "--version",
        action=_Version,
        nargs=0,
        dest=argparse.SUPPRESS,
        default=argparse.SUPPRESS,
        help="Print the version, then exit",
    )
    parser.add_argument(
        "training_script",
        nargs=None if needs_script else "?",
        metavar="script",
        help="Script, module or program to run as each rank",
    )
    parser.add_argument(
        "training_script_args", metavar="...", nargs=argparse.REMAINDER, help="Arguments of the script"
    )
    return parser


def parse(argv: Sequence[str], environ: Mapping[str, str], prog: str = "bootrun") -> argparse.Namespace:
    """Parse a command line; exit as argparse does if it is wrong (status 2) or requests help."""
    return get_args_parser(environ, prog).parse_args(argv)


def _add(group: argparse._ArgumentGroup, flag: Flag, given: str | None) -> None:
    text = flag.help.replace("%", "%%")
    if flag.kind is None:
        on = given is not None and is_on(flag, given)
        group.add_argument(*flag.spellings, dest=flag.dest, action="store_true", default=on, help=text)
        return
    if given is not None and flag.ours and flag.choices and given not in flag.choices:
        raise UsageError(f"{flag.env}={given}: choose {' or '.join(flag.choices)}")
    if flag.is_repeated:
        group.add_argument(
            *flag.spellings,
            dest=flag.dest,
            action="append",
            default=[] if given is None else flag.kind(given),
            metavar=flag.metavar,
            help=text,
        )
        return
    default = flag.default if given is None else given
    if flag.dest == "print_completion":
        group.add_argument(
            *flag.spellings,
            dest=flag.dest,
            action=_PrintCompletion,
            choices=flag.choices,
            metavar=flag.metavar,
            help=text,
        )
        return
    group.add_argument(
        *flag.spellings,
        dest=flag.dest,
        type=flag.kind,
        default=default,
        choices=flag.choices,
        metavar=flag.metavar,
        help=text,
    )


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Shows each flag once, without its underscore spelling, and its value once."""

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(name for name in action.option_strings if "_" not in name)
        if action.nargs == 0:
            return names
        return f"{names} {self._format_args(action, action.dest.upper())}"


def _make_formatter(prog: str) -> argparse.HelpFormatter:
    # Without a width argparse imports shutil for every flag: 2 ms of each start.
    columns = os.environ.get("COLUMNS", "")
    width = int(columns) if columns.isdecimal() and int(columns) >= 40 else 110
    return _Formatter(prog, max_help_position=30, width=width)


class _PrintCompletion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: object, *__: object) -> None:
        if not isinstance(shell, str):  # a bare --
            parser.error("argument --print-completion: expected one argument")
        try:
            text = complete(get_args_parser({}, "bootrun", needs_script=False), shell)
        except ModuleNotFoundError:
            parser.exit(
                1, f"{parser.prog}: error: --print-completion needs shtab: pip install 'bootseer[completion]'\n"
            )
        sys.stdout.write(text)
        parser.exit(0)


def complete(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return the completion script of a program for a shell. Raises: ModuleNotFoundError without shtab."""
    import shtab

    # Arguments that the parser does not know are file names: without -o default bash offers nothing.
    return shtab.complete(parser, shell=shell).replace("complete -o bashdefault -F", FILES_TOO) + "\n"


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from bootseer import __version__

        sys.stdout.write(f"bootrun (bootseer) {__version__}\n")
        parser.exit(0)
