"""An adaptive limit of in-flight reads: it grows while throughput does, and shrinks after failures. Pure.

Additive increase, multiplicative decrease, by measured throughput. The width doubles from the start while the rate
grows. Then it holds, probes a quarter more from time to time, and keeps it only if the rate grows. Failed probes
get rarer, so that the width does not oscillate. Failures, and a lasting drop of the rate, narrow it. This module
also computes the wait before a retry. Times are seconds of any one clock.
"""

from __future__ import annotations

from enum import Enum

from bootseer.backoff import Backoff

START_WIDTH = 8
MAX_WIDTH = 64
MIN_SLOW_WIDTH = 4  # a slow store alone never narrows the width below it

WINDOW_PIECES = 8  # minimum for measuring a rate; also at least one round of all in-flight reads
DOUBLING_GAIN = 1.2  # factor by which doubling must raise the rate
PROBE_GAIN = 0.3  # share of the larger width that must appear in the rate
SLOW = 0.6  # a rate below this share of the usual one, twice in a row, is a slow-down
CUT = 0.7  # of the width after failures
SLOW_CUT = 0.75
FIRST_HOLD, MAX_HOLD = 2, 64  # windows between probes of a larger width

MAX_BACKOFF_S = 8.0
BACKOFF = Backoff(0.1, MAX_BACKOFF_S)
MAX_RETRY_AFTER_S = 30.0


def backoff_s(failures: int, jitter: float, retry_after_s: float = 0.0) -> float:
    """Return the wait after so many failures in a row (from 1): the store's wish, then full jitter (0 to 1)."""
    return BACKOFF.wait_s(failures, jitter) + min(MAX_RETRY_AFTER_S, max(0.0, retry_after_s))


class Phase(Enum):
    STARTING = "starting"  # doubles while the rate grows
    HOLDING = "holding"
    PROBING = "probing"  # tests a larger width


class ConcurrencyLimit:
    """The width for one store. The caller reports every finished or failed piece."""

    def __init__(self, start: int = START_WIDTH, most: int = MAX_WIDTH, least: int = 1) -> None:
        if not 1 <= least <= start <= most:
            raise ValueError(f"widths must be 1 <= {least} <= {start} <= {most}")
        self.width = start
        self._least, self._most = least, most
        self._phase = Phase.STARTING
        self._base_width, self._base_rate = start, 0.0  # bytes/s, 0: not measured yet
        self._hold, self._next_hold = 0, FIRST_HOLD  # windows
        self._slow_windows = 0
        self._failures = 0  # in this window
        self._cut_s = float("-inf")
        self._begin_s: float | None = None  # of the window
        self._last_s = 0.0
        self._pieces = self._bytes = 0
        self._is_full = True

    def done(self, started_s: float, now_s: float, length_bytes: int, *, is_full: bool) -> None:
        """Record a finished piece. `is_full`: the whole width was in use (else the rate does not depend on it)."""
        if self._begin_s is None:
            self._open(started_s)
        if self._is_complete(now_s):
            self._close()
        self._last_s = now_s
        self._pieces += 1
        self._bytes += length_bytes
        self._is_full = self._is_full and is_full

    def failed(self, started_s: float, now_s: float) -> None:
        """Record a failure that a retry may fix."""
        if started_s < self._cut_s:
            return  # it began before the last cut, so it does not concern the width since then
        self._failures += 1
        if self._failures < max(2, self.width // 8):
            return  # one lost connection is not a store in trouble
        self._cut_s = now_s
        self._rest(max(self._least, int(self.width * CUT)), 0.0)
        self._next_hold = FIRST_HOLD
        self._open(now_s)

    # ---- windows -------------------------------------------------------------------------------------------

    def _open(self, begin_s: float) -> None:
        self._begin_s = self._last_s = begin_s
        self._pieces = self._bytes = self._failures = 0
        self._is_full = True

    def _is_complete(self, now_s: float) -> bool:
        """Return whether the window is complete. It must not end inside a burst of pieces that finish together."""
        assert self._begin_s is not None
        needed = max(WINDOW_PIECES, self.width)
        if self._pieces < needed or self._last_s <= self._begin_s:
            return False
        usual_s = (self._last_s - self._begin_s) / self._pieces
        return now_s - self._last_s >= usual_s or self._pieces >= 3 * needed

    def _close(self) -> None:
        assert self._begin_s is not None
        rate = self._bytes / (self._last_s - self._begin_s)
        if self._is_full:
            self._decide(rate)
        self._open(self._last_s)

    # ---- decisions -----------------------------------------------------------------------------------------

    def _decide(self, rate: float) -> None:
        match self._phase:
            case Phase.STARTING:
                if rate < self._base_rate * DOUBLING_GAIN:
                    self._rest(self._base_width, max(rate, self._base_rate))
                else:
                    self._base_width, self._base_rate = self.width, rate
                    if self.width == self._most:
                        self._rest(self.width, rate)
                    self.width = min(self._most, self.width * 2)
            case Phase.PROBING:
                gain = 1.0 + PROBE_GAIN * (self.width / self._base_width - 1.0)
                if rate >= self._base_rate * gain:
                    self._next_hold = FIRST_HOLD
                    self._rest(self.width, rate)
                else:
                    self._next_hold = min(MAX_HOLD, self._next_hold * 2)
                    self._rest(self._base_width, self._base_rate)
            case Phase.HOLDING:
                self._keep(rate)

    def _keep(self, rate: float) -> None:
        self._slow_windows = self._slow_windows + 1 if rate < self._base_rate * SLOW else 0
        if self._slow_windows >= 2:
            self._rest(max(min(self.width, MIN_SLOW_WIDTH), int(self.width * SLOW_CUT)), rate)
            return
        if not self._slow_windows:  # a slow window is either chance or the first of two
            self._base_rate = 0.7 * self._base_rate + 0.3 * rate if self._base_rate else rate
        self._hold -= 1
        if self._hold <= 0 and self.width < self._most and not self._slow_windows:
            self._phase = Phase.PROBING
            self.width = min(self._most, self.width + max(1, self.width // 4))

    def _rest(self, width: int, rate: float) -> None:
        self._phase = Phase.HOLDING
        self.width = self._base_width = width
        self._base_rate = rate
        self._hold = self._next_hold
        self._slow_windows = 0
