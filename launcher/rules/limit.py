"""A bound on the CPU time of a search with a pattern of the user's, which can take for ever.

Python's `re` looks for signals while it searches, so a timer ends it. Of the main thread only; what is called has
to be free to be ended anywhere.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _TooLong(BaseException):
    """Not to be caught by what is called."""


class TimeLimit:
    """`close` gives back the signal (SIGVTALRM)."""

    def __init__(self, most_s: float) -> None:
        """Args: most_s: of CPU time, for one call."""
        self._most_s = most_s
        self._is_on = False
        self._before = signal.signal(signal.SIGVTALRM, self._on_time)

    def run(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None when it took too long."""
        try:
            self._is_on = True
            signal.setitimer(signal.ITIMER_VIRTUAL, self._most_s)
            try:
                return work()
            finally:
                self._is_on = False
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        except _TooLong:
            self._is_on = False
            return None

    def close(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, self._before)

    def _on_time(self, _signum: int, _frame: object) -> None:
        if self._is_on:  # else it came in the moment after
            self._is_on = False
            raise _TooLong
