"""Lines about what a start waits for: the first after a while, then at intervals."""

from __future__ import annotations

import time
from collections.abc import Callable

from launcher.base.loop import Alarm, EventLoop

FIRST_AFTER_S = 10.0
EVERY_S = 30.0


class WaitingLines:
    """Logs how long a part of the start takes, between `begin` and `stop`."""

    def __init__(
        self,
        loop: EventLoop,
        say: Callable[[str], object],
        began_ns: Callable[[], int],
        line: Callable[[str], str],
    ) -> None:
        """Args: began_ns: since when, on the monotonic clock; line: makes a line of a text like "12 s so far"."""
        self._say = say
        self._began_ns = began_ns
        self._line = line
        self._alarm = Alarm(loop)

    def begin(self) -> None:
        """Log from now on; if it has begun, only the time of the next line changes."""
        self._alarm.set(FIRST_AFTER_S, self._log)

    @property
    def has_begun(self) -> bool:
        return self._alarm.is_set

    def stop(self) -> None:
        self._alarm.cancel()

    def _log(self) -> None:
        waited_s = (time.monotonic_ns() - self._began_ns()) / 1e9
        self._say(self._line(f"{waited_s:.0f} s so far"))
        self._alarm.set(EVERY_S, self._log)
