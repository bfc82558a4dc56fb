"""What the commands of `bootseer image` share on the command line: options, lines for people, results."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any

import typer

from bootseer.cli.progress import LOG_EVERY_S, TERMINAL_EVERY_S, ProgressLine, format_bytes
from bootseer.cli.sizes import parse_size
from bootseer.counted import counted

Url = Annotated[
    str, typer.Argument(metavar="URL", help="of a tree: a folder, a store's URL, or oci://REGISTRY/NAME:TAG")
]
Name = Annotated[
    str, typer.Option("--name", metavar="NAME", help="of the tree, where it is not the URL's (a copy, a mirror)")
]
Workload = Annotated[
    str,
    typer.Option(
        metavar="KEY", help="16 hex digits: of which recordings (`hot show` shows them); any: for anything"
    ),
]
Key = Annotated[str, typer.Option("--key", metavar="FILE", help="private key to sign with (default this user's)")]
Unsigned = Annotated[bool, typer.Option("--unsigned", help="do not sign")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress")]


class CountLine(ProgressLine):
    """Progress of what has no known end: `bootseer image build: 1.2 GB in 3,400 files, 140 MB/s`."""

    files = 0

    def count(self, size: int, files: int) -> None:
        """More bytes and files."""
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


def say(line: str) -> None:
    """A line for people, which no script reads."""
    clear = "\r\x1b[K" if sys.stderr.isatty() else ""
    sys.stderr.write(f"{clear}bootseer: {line}\n")
    sys.stderr.flush()


def report(record: dict[str, Any], as_json: bool, text: str) -> None:
    """The result of a command, on stdout."""
    sys.stdout.write((json.dumps(record) if as_json else text) + "\n")


def size_of(text: str | None, flag: str) -> int | None:
    """Bytes; None without the flag."""
    return None if text is None else parse_size(text, flag)


def short(digest: str) -> str:
    """For people."""
    return digest[:16]
