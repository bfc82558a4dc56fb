"""The configuration of `logging` for logs.py, which imports this module with the first line."""

from __future__ import annotations

import logging

from bootseer.log_lines import PREFIXES, Write, destination


class LineHandler(logging.Handler):
    """Sends each record as one line to `write`, whose exceptions reach the code that logs."""

    def __init__(self, write: Write) -> None:
        super().__init__()
        self._write = write

    def emit(self, record: logging.LogRecord) -> None:
        self._write(PREFIXES.get(record.levelno, "") + record.getMessage())


def get(name: str, *, prints: bool) -> logging.Logger:
    """Return a logger. Args: prints: without any handler, Python prints its warnings to stderr."""
    logger = logging.getLogger(name)
    if not prints and not logger.handlers:
        logger.addHandler(logging.NullHandler())
    return logger


def configure() -> None:
    """Send all records to the destination; without one, to the handlers of the library's user."""
    write = destination()
    logger = logging.getLogger("bootseer")
    others = [each for each in logger.handlers if not isinstance(each, LineHandler)]
    if write is None and others == logger.handlers:
        return  # nothing was changed
    # One assignment: no line is lost or sent twice if another thread logs.
    logger.handlers = others if write is None else [*others, LineHandler(write)]
    logger.propagate = write is None  # a library may have configured the root
    logger.setLevel(logging.NOTSET if write is None else logging.INFO)


configure()  # while it is imported, other threads wait
