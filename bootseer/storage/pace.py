"""How many reads to have in flight: as many as bring more, fewer when the store complains. Pure.

Additive increase, multiplicative decrease, by measured throughput: the width doubles from the start while that
helps; then it holds, tries a quarter more from time to time and stays there only if the rate grows. Tries that
bring nothing get rarer, so that the width does not swing. Failures, and a rate that falls for good, narrow it.
Also: how long to wait before a try. Times are seconds of any one clock.
"""

from __future__ import annotations

from enum import Enum

START_WIDTH = 8
MOST_WIDTH = 64
LEAST_SLOW_WIDTH = 4  # a slow store alone never brings the width below it

WINDOW_PIECES = 8  # a rate is measured over at least so many pieces, and over one round of all in flight
DOUBLING_GAIN = 1.2  # rate by which a doubled width must be better
PROBE_GAIN = 0.3  # share of the larger width that must be seen in the rate
SLOW = 0.6  # a rate below this share of the usual one, twice in a row, is a slow-down
CUT = 0.7  # of the width after failures
SLOW_CUT = 0.75
FIRST_HOLD, MOST_HOLD = 2, 64  # windows between tries of a larger width

BACKOFF_S, MOST_BACKOFF_S = 0.1, 8.0
MOST_RETRY_AFTER_S = 30.0


def backoff_s(failures: int, jitter: float, retry_after_s: float = 0.0) -> float:
    """The wait after so many failures in a row (from 1): what the store asks for, then full jitter (0 to 1)."""
    wait_s = jitter * min(MOST_BACKOFF_S, BACKOFF_S * 2.0 ** min(failures - 1, 10))
    return wait_s + min(MOST_RETRY_AFTER_S, max(0.0, retry_after_s))


class Phase(Enum):
    STARTING = "starting"  # doubles while that helps
    HOLDING = "holding"
    PROBING = "probing"  # is a larger width better?


class Pace:
    """The width for one store; tell it of every piece that came or failed."""

    def __init__(self, start: int = START_WIDTH, most: int = MOST_WIDTH, least: int = 1) -> None:
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
        """A piece came. `is_full`: all of the width was in use (else the rate says nothing about the width)."""
        if self._begin_s is None:
            self._open(started_s)
        if self._is_complete(now_s):
            self._close()
        self._last_s = now_s
        self._pieces += 1
        self._bytes += length_bytes
        self._is_full = self._is_full and is_full

    def failed(self, started_s: float, now_s: float) -> None:
        """A read failed in a way that another try may mend."""
        if started_s < self._cut_s:
            return  # it was under way before the last cut and says nothing about the width since
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
        """Pieces that were started together come together: a window must not end inside such a burst."""
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
                    self._next_hold = min(MOST_HOLD, self._next_hold * 2)
                    self._rest(self._base_width, self._base_rate)
            case Phase.HOLDING:
                self._keep(rate)

    def _keep(self, rate: float) -> None:
        self._slow_windows = self._slow_windows + 1 if rate < self._base_rate * SLOW else 0
        if self._slow_windows >= 2:
            self._rest(max(min(self.width, LEAST_SLOW_WIDTH), int(self.width * SLOW_CUT)), rate)
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
