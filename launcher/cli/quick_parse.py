"""The usual command lines of bootrun, without argparse, whose import and tables are a quarter of a bare start.

What this file does not fully understand (an abbreviation, an unknown flag, a value that begins with a dash, an
error, a request for help) is left to argparse (parser.py), which then parses the whole line.
"""

from __future__ import annotations

from types import SimpleNamespace

from bootseer.errors import ConfigError
from bootseer.light_typing import TYPE_CHECKING, Any, Mapping, Sequence
from launcher.cli.flags import FLAGS, Flag, is_on

if TYPE_CHECKING:
    from argparse import Namespace

    Arguments = Namespace | SimpleNamespace


class _NotUnderstoodError(Exception):
    """Only argparse knows."""


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Arguments:
    """Return the values of a command line. End the process as argparse does if it is wrong or asks for help."""
    found = parse_usual(argv, environ)
    if found is not None:
        return found
    from launcher.cli import parser as cli

    return cli.parse(argv, environ)


def parse_usual(argv: Sequence[str], environ: Mapping[str, str]) -> SimpleNamespace | None:
    """Return what argparse would make of a command line; None if only argparse can tell."""
    try:
        return _parse(argv, environ)
    except (_NotUnderstoodError, ConfigError, ValueError, TypeError):
        return None


def _parse(argv: Sequence[str], environ: Mapping[str, str]) -> SimpleNamespace:
    flags = {name: flag for flag in FLAGS for name in flag.spellings if flag.dest != "print_completion"}
    found = {flag.dest: _default(flag, environ.get(flag.env) if flag.env else None) for flag in FLAGS}
    place = 0
    while place < len(argv) and argv[place].startswith("-"):
        name, equals, value = argv[place].partition("=")
        flag = flags.get(name)
        if flag is None:
            raise _NotUnderstoodError
        place += 1
        if flag.kind is None:
            if equals:
                raise _NotUnderstoodError
            found[flag.dest] = True
            continue
        if not equals:
            value = argv[place] if place < len(argv) else ""
            place += 1
        if not value or (not equals and value.startswith("-")) or (equals and not name.startswith("--")):
            raise _NotUnderstoodError
        if flag.is_repeated:
            found[flag.dest] = [*found[flag.dest], value]
            continue
        found[flag.dest] = flag.kind(value)
        if flag.choices is not None and found[flag.dest] not in flag.choices:
            raise _NotUnderstoodError
    if place >= len(argv) or "--" in argv:
        raise _NotUnderstoodError
    return SimpleNamespace(**found, training_script=argv[place], training_script_args=list(argv[place + 1 :]))


def _default(flag: Flag, given: str | None) -> Any:
    if flag.kind is None:
        return given is not None and is_on(flag, given)
    if given is None:
        if flag.is_repeated:
            return []
        # argparse converts defaults that are texts.
        return flag.kind(flag.default) if isinstance(flag.default, str) else flag.default
    if flag.ours and flag.choices and given not in flag.choices:
        raise _NotUnderstoodError
    if flag.is_repeated:
        return flag.kind(given)
    if flag.dest == "print_completion":
        raise _NotUnderstoodError
    return flag.kind(given)
