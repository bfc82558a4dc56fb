"""Shared parts of the commands of `bootseer image`: options, progress, messages, results."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from bootseer.cli.progress import LOG_EVERY_S, TERMINAL_EVERY_S, ProgressLine
from bootseer.cli.sizes import parse_size
from bootseer.counted import counted, format_bytes

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


class CountLine(ProgressLine):
    """Progress of work of unknown size: `bootseer image build: 1.2 GB in 3,400 files, 140 MB/s`."""

    files = 0

    def count(self, size: int, files: int) -> None:
        """Add bytes and files."""
        self.files += files
        self(self.done + size, 0)

    def __call__(self, done: int, total: int) -> None:
        if total:
            super().__call__(done, total)
            return
        self._draw(done, f"{format_bytes(done)} in {counted(self.files, 'file')}")

    def _draw(self, done: int, what: str) -> None:
        self.done = done
        now_s = time.monotonic()
        every_s = TERMINAL_EVERY_S if self._is_terminal else LOG_EVERY_S
        if self._is_quiet or now_s - self._shown_s < every_s:
            return
        self._shown_s = now_s
        text = f"{self._what}: {what}, {self.rate()}"
        self._stream.write(f"\r\x1b[K{text}" if self._is_terminal else f"{text}\n")
        self._is_drawn = self._is_terminal
        self._stream.flush()


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
