"""Shared parts of the commands of `bootseer image`: options, progress, messages, results."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from bootseer.cli.sizes import parse_size

Url = Annotated[
    str,
    typer.Argument(metavar="URL", help="URL of a tree: a directory, a store's URL, or oci://REGISTRY/NAME:TAG"),
]
Name = Annotated[
    str, typer.Option("--name", metavar="NAME", help="Name of the tree, if not the URL's (a copy, a mirror)")
]
Workload = Annotated[
    str,
    typer.Option(metavar="KEY", help="Workload of the access traces, 16 hex digits (see `hot show`), or any"),
]
Key = Annotated[str, typer.Option("--key", metavar="FILE", help="Private key to sign with (default: this user's)")]
Unsigned = Annotated[bool, typer.Option("--unsigned", help="Do not sign")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Omit progress")]


def print_message(line: str) -> None:
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{clear}bootseer: {line}\n")
    sys.stderr.flush()


def print_result(record: dict[str, Any], as_json: bool, text: str) -> None:
    """Print the result of a command to stdout."""
    sys.stdout.write((json.dumps(record) if as_json else text) + "\n")


def size_of(text: str | None, flag: str) -> int | None:
    """Return the size in bytes; None without the flag."""
    return None if text is None else parse_size(text, flag)


def short(digest: str) -> str:
    """Shorten a digest for display."""
    return digest[:16]
