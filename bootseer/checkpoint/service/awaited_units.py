"""PURE: the units of a load that ranks wait for, and those that the store could not deliver yet.

In: units that were planned, have arrived or have failed, and the time. Out: whether ranks still wait, which units
to retry, and when to stop waiting for the store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Set
from math import inf

from bootseer.checkpoint.io.arena import Unit

AWAY_WAIT_S = 2.0  # before units are retried


class AwaitedUnits:
    """The awaited units of one load at a time."""

    def __init__(self) -> None:
        self._planned: set[Unit] = set()
        self.is_waiting = False  # ranks start when all planned units are ready
        self._away: dict[Unit, None] = {}  # units that the store could not deliver
        self._away_why, self._again_s = "", 0.0
        self._moved_s = 0.0  # time of the last progress

    @property
    def planned(self) -> Set[Unit]:
        return self._planned

    @property
    def holds_ranks(self) -> bool:
        return self.is_waiting and bool(self._planned)

    def begin(self) -> None:
        """Begin another load."""
        self._planned, self.is_waiting = set(), False
        self._away, self._away_why = {}, ""

    def plan(self, units: Iterable[Unit], now_s: float) -> None:
        """Set the units that are prefetched."""
        self._planned = set(units)
        self._moved_s = now_s

    def forget_planned(self) -> None:
        """Wait for no unit: the arena is released."""
        self._planned = set()

    def holds_for(self, units: Collection[Unit]) -> bool:
        """Return whether ranks wait for one of these units."""
        return self.is_waiting and not self._planned.isdisjoint(units)

    def settle(self, units: Collection[Unit], now_s: float) -> None:
        """Record that units are ready, or have failed without ranks that wait for them."""
        if self._away:
            for unit in units:
                self._away.pop(unit, None)
        self._moved_s = now_s
        self._planned.difference_update(units)

    def move(self, now_s: float) -> None:
        """Record that bytes have arrived."""
        self._moved_s = now_s

    def add_away(self, units: Iterable[Unit], why: str, now_s: float) -> bool:
        """Record units that the store could not deliver; return whether they are the first ones."""
        is_first = not self._away
        self._away.update(dict.fromkeys(units))
        self._away_why, self._again_s = why, now_s + AWAY_WAIT_S
        return is_first

    def why_given_up(self, now_s: float, limit_s: float) -> str:
        """Return why the store is not waited for any longer; "" while it has sent bytes within the limit."""
        if now_s - self._moved_s <= limit_s:
            return ""
        why = f"no bytes received for {limit_s:g} s"
        return f"{why}: {self._away_why}" if self._away_why else why

    def take_retries(self, now_s: float) -> list[Unit]:
        """Return the units to retry now; they are not returned again before they have failed again."""
        if not self._away or now_s < self._again_s:
            return []
        self._again_s = inf
        return list(self._away)
