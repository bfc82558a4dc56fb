"""The log of connections that a coordinator rejects: anybody can open many of them, so few lines are written."""

from __future__ import annotations

from collections.abc import Callable

from launcher.base.loop import EventLoop

_REPORT_S = 10.0  # interval between two lines


class RejectionLog:
    """Counts rejected connections, and logs some of them."""

    def __init__(self, loop: EventLoop, say: Callable[[str], object]) -> None:
        self._loop = loop
        self._say = say
        self._reported, self._reported_s = 0, -_REPORT_S
        self._is_full_reported = False
        self.count = 0

    def add(self, text: str) -> None:
        """Count a rejected connection; `text` is a line about it."""
        self.count += 1
        self.report(text)

    def report(self, text: str) -> None:
        """Log a line that concerns such connections; more of them within a while are only counted."""
        now_s = self._loop.time()
        if now_s - self._reported_s < _REPORT_S:
            return
        more = self.count - self._reported - 1
        self._reported, self._reported_s = self.count, now_s
        self._say(text + (f" (and {more} before)" if more > 0 else ""))

    def warn_full(self, max_files: int) -> None:
        """Log, once, that there is no room for more connections. Args: max_files: the limit of open files."""
        if not self._is_full_reported:
            self._is_full_reported = True
            self._say(
                f"warning: no more nodes can connect: the limit of {max_files} open files is reached; "
                "raise the hard limit of this node (ulimit -Hn)"
            )
