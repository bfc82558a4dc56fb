"""Huge pages or small ones for memory that is made now: whichever costs less here. Decides, does nothing.

Huge pages cost a quarter of small ones where the machine has its memory. In a virtual machine that gave its free
memory back to the host they cost twice as much (measured: 2.4 against 1.2 CPU s a GB), as they are taken from what
was given back. So the costs of both are measured as memory is made; the other kind is tried again now and then.
"""

from __future__ import annotations

TRY_EVERY = 16  # pieces, of which one is of the other kind
HUGE_WORTH = 1.5  # reads into huge pages are faster as well: they may cost so many times as much
NEW_SHARE = 0.5  # of the latest cost in what is remembered


class PageChoice:
    """For one load; used by several threads, which may lose each other's last measure."""

    def __init__(self) -> None:
        self._costs_s: dict[bool, float] = {}  # a byte, by whether pages are huge
        self._pieces = 0

    def take(self) -> bool:
        """Whether the next piece is made of huge pages."""
        number, self._pieces = self._pieces, self._pieces + 1
        if number < 2:
            return number == 0
        huge, small = self._costs_s.get(True, 0.0), self._costs_s.get(False, 0.0)
        is_huge = not small or huge <= HUGE_WORTH * small
        return is_huge != (number % TRY_EVERY == 0)

    def took(self, is_huge: bool, length: int, took_s: float) -> None:
        """How long a piece of `length` bytes took."""
        cost_s = took_s / max(length, 1)
        before_s = self._costs_s.get(is_huge, cost_s)
        self._costs_s[is_huge] = before_s + NEW_SHARE * (cost_s - before_s)
