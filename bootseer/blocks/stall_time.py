"""Stall time of readers: the union of their waits, not the sum, and whether a reader waits now.

The time that a start loses to missing blocks is the time in which at least one of its readers was blocked.
For one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bootseer.histogram import TimeHistogram


class StallTime:
    """Waits of readers; times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self.count = 0  # waits that have ended or begun
        self.histogram = TimeHistogram()  # of those that have ended, each by itself
        self._waiting = 0
        self._begin_s = 0.0  # of the current stall: at least one reader waits
        self._ended_s = float("-inf")
        self._blocked_s = 0.0
        self._is_over = asyncio.Event()

    @contextmanager
    def one(self, since_s: float | None = None) -> Iterator[None]:
        """Count a reader as waiting, from `since_s` or now until the `with` block ends."""
        now_s = time.monotonic()
        began_s = now_s if since_s is None else since_s
        if not self._waiting:
            self._begin_s = max(self._ended_s, began_s)
            self._is_over.clear()
        self._waiting += 1
        self.count += 1
        try:
            yield
        finally:
            self._waiting -= 1
            now_s = time.monotonic()
            self.histogram.add(now_s - began_s)
            if not self._waiting:
                self._ended_s = now_s
                self._blocked_s += self._ended_s - self._begin_s
                self._is_over.set()

    @property
    def blocked_s(self) -> float:
        """Return the stall time so far, in seconds."""
        return self._blocked_s + (time.monotonic() - self._begin_s if self._waiting else 0.0)

    async def quiet(self, quiet_s: float) -> None:
        """Wait until no reader has waited for so long."""
        while True:
            if self._waiting:
                await self._is_over.wait()
                continue
            left_s = self._ended_s + quiet_s - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)
