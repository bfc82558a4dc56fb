"""The log of a mount: one line for each fault, not one for each program that retries."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

QUIET_S = 10.0  # the same line is not written again within it
REMEMBERED = 1000


class Log:
    """Writes lines with `write`; may be called from any thread."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._written_s: dict[str, float] = {}

    def __call__(self, line: str) -> None:
        line = " ".join(line.split())
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._written_s.get(line, -QUIET_S) < QUIET_S:
                return
            if len(self._written_s) >= REMEMBERED:
                self._written_s.clear()
            self._written_s[line] = now_s
        try:
            self._write(line)
        except (OSError, ValueError):
            pass  # the log has no reader; the mount continues
