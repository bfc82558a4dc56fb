"""A priority semaphore for reads: as many at once as the pace allows, demand before prefetch.

For one event loop. An overdue read may lend its place to another, so that a few hanging reads do not stop all.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MAX_LENT = 16  # places; if everything hangs, the store does not get twice the load


class ReadSemaphore:
    """Places for reads; `width` returns their current number.

    A reader announces its number of reads (`announce`), enters for each, and withdraws those that it does not need
    (`withdraw`).
    """

    def __init__(self, width: Callable[[], int]) -> None:
        self._width = width
        self._demand: deque[asyncio.Future[None]] = deque()
        self._prefetch: deque[asyncio.Future[None]] = deque()
        self._demand_to_come = self._prefetch_to_come = 0
        self.in_use = 0  # places; those lent are not counted
        self.lent = 0

    @property
    def is_wanted(self) -> bool:
        """Whether a larger width would start more reads."""
        return self._demand_to_come + self._prefetch_to_come > 0

    def announce(self, times: int, *, is_demand: bool) -> None:
        if is_demand:
            self._demand_to_come += times
        else:
            self._prefetch_to_come += times

    def withdraw(self, times: int, *, is_demand: bool) -> None:
        self.announce(-times, is_demand=is_demand)
        self._admit()

    async def enter(self, *, is_demand: bool) -> None:
        """Wait for a place; `leave` returns it."""
        if self._is_open(is_demand):
            self._take(is_demand)
            return
        place = asyncio.get_running_loop().create_future()
        (self._demand if is_demand else self._prefetch).append(place)
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # the place was granted in the same moment
                self.announce(1, is_demand=is_demand)
                self.leave(is_lent=False)
            raise

    def leave(self, *, is_lent: bool) -> None:
        """Return a place. Also to be called after the width has grown."""
        if is_lent:
            self.lent -= 1
        else:
            self.in_use -= 1
        self._admit()

    def try_lend(self) -> bool:
        """Lend the caller's place to another read; the caller then leaves with `is_lent`."""
        if self.lent >= MAX_LENT:
            return False
        self.in_use -= 1
        self.lent += 1
        self._admit()
        return True

    def _is_open(self, is_demand: bool) -> bool:
        # A reader that announces many places waits here once; the remaining places are its own.
        waiting = self._demand if is_demand else self._prefetch
        return self.in_use < self._width() and not waiting and (is_demand or not self._demand_to_come)

    def _take(self, is_demand: bool) -> None:
        self.in_use += 1
        self.announce(-1, is_demand=is_demand)

    def _admit(self) -> None:
        self._let_in(self._demand, is_demand=True)
        if not self._demand_to_come:
            self._let_in(self._prefetch, is_demand=False)

    def _let_in(self, waiting: deque[asyncio.Future[None]], *, is_demand: bool) -> None:
        while waiting and self.in_use < self._width():
            place = waiting.popleft()
            if not place.done():  # else its waiter was cancelled
                self._take(is_demand)
                place.set_result(None)
