"""How lines of logs.py begin, and where this process sends them: what logs.py and log_handler.py share.

Separate because log_handler.py imports `logging`, and logs.py, which imports that late, must not.
"""

from __future__ import annotations

from collections.abc import Callable

Write = Callable[[str], object]

INFO, WARNING, ERROR = 20, 30, 40  # of logging
PREFIXES = {WARNING: "warning: ", ERROR: "error: "}

_write: Write | None = None  # None: the library's user decides


def destination() -> Write | None:
    """Return what `set_destination` has set last."""
    return _write


def set_destination(write: Write | None) -> None:
    """Set the destination; `send_to` of logs.py also configures `logging` for it."""
    global _write
    _write = write
