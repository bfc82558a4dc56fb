"""Lines for users, by the standard library's `logging`: loggers of modules, and where a program sends their lines.

    _log = get_logger(__name__)  # in a module
    send_to(print_message)       # in a program, at its start

Without `send_to` nothing is printed: users of the library may configure the logger "bootseer". A warning begins
with `warning: `, an error with `error: `. `logging` costs 5 ms of CPU time, so the first line imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bootseer.log_lines import INFO, PREFIXES, WARNING, Write, destination, set_destination

if TYPE_CHECKING:
    import logging


class Logger:
    """The logger of a module, which `logging` has under the same name once it is used. For any thread."""

    def __init__(self, name: str, *, prints: bool) -> None:
        self._name, self._prints = name, prints
        self._logger: logging.Logger | None = None

    def info(self, message: str, *args: object) -> None:
        """Log a line; arguments are formatted as by `%`."""
        self._log(INFO, message, args)

    def warning(self, message: str, *args: object) -> None:
        """Log a line that is printed after `warning: `."""
        self._log(WARNING, message, args)

    def line(self, line: str) -> None:
        """Log a line that was made elsewhere: its prefix is its level."""
        for level, prefix in PREFIXES.items():
            if line.startswith(prefix):
                self._log(level, line[len(prefix) :], ())
                return
        self._log(INFO, line, ())

    def _log(self, level: int, message: str, args: tuple[object, ...]) -> None:
        if self._logger is None:
            if destination() is None and not self._prints and "logging" not in sys.modules:
                return  # it would have no reader
            from bootseer.log_handler import get

            self._logger = get(self._name, prints=self._prints)
        self._logger.log(level, message, *args, stacklevel=3)


def get_logger(name: str, *, prints: bool = False) -> Logger:
    """Return the logger of a module. Args: prints: warnings go to stderr if no destination is configured."""
    return Logger("bootseer.program" if name == "__main__" else name, prints=prints)  # run by `python -m`


def send_to(write: Write | None) -> None:
    """Send the lines of this process to `write` and to nothing else; None: to what its user has configured."""
    set_destination(write)
    if "logging" in sys.modules:
        prepare()


def prepare() -> None:
    """Import `logging` now: the first line may come when no file can be read any more."""
    from bootseer.log_handler import configure

    configure()


@contextmanager
def sent_to(write: Write) -> Iterator[None]:
    """Send the lines of this process to `write` meanwhile."""
    before = destination()
    send_to(write)
    try:
        yield
    finally:
        send_to(before)
