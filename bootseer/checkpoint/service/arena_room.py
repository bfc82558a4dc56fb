"""PURE: which units of an arena have room in the memory that it may take."""

from __future__ import annotations

from bootseer.checkpoint.io.arena import Arena, Unit


class ArenaRoom:
    """The room of one arena. A unit that is counted once stays counted."""

    def __init__(self, arena: Arena, free_bytes: int) -> None:
        self._arena = arena
        self.free_bytes = free_bytes
        self._counted = bytearray(arena.units)

    def admit(self, unit: Unit) -> bool:
        """Return whether there is room for a unit; count it."""
        if not self._counted[self._place(unit)]:
            start, end = self._arena.extent(*unit)
            if end - start > self.free_bytes:
                return False
            self.count(unit)
        return True

    def count(self, unit: Unit) -> None:
        """Count a unit that has memory already."""
        self._counted[self._place(unit)] = 1
        start, end = self._arena.extent(*unit)
        self.free_bytes -= end - start

    def _place(self, unit: Unit) -> int:
        return self._arena.first_unit[unit[0]] + unit[1]
