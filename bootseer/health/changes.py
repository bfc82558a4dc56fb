"""Pure. What is new between two looks at a node, and what is over: each is told once.

In: the findings of each look. Out: those that have come or become worse, and those that have gone. What was not
seen in one look alone is not over yet, and what comes and goes is told a few times only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bootseer.health.finding import BAD, HUNG, LEVELS, WARN, Finding

CALM_LOOKS = 2  # without it, until it is over
MOST_RETURNS = 3  # of one finding; after that it is quiet about it
MOST_KNOWN = 256
# What the kernel has said stays said.
_LASTING = {"kernel-log"}

_Key = tuple[str, str, str]


class Change(NamedTuple):
    finding: Finding
    is_over: bool


class _Known:
    __slots__ = ("calm", "finding")

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        self.calm = 0  # looks since it was seen


class Changes:
    """Of one node."""

    def __init__(self) -> None:
        self._known: dict[_Key, _Known] = {}
        self._returns: dict[_Key, int] = {}

    def look(self, checks: Iterable[str], findings: Iterable[Finding]) -> list[Change]:
        """Args: checks: that were made this time; of others nothing can be over."""
        changes = []
        seen: set[_Key] = set()
        for found in findings:
            if found.level not in BAD and found.level != WARN:
                continue
            key = _key(found)
            seen.add(key)
            known = self._known.get(key)
            if known is not None:
                known.calm = 0
                if LEVELS.index(found.level) > LEVELS.index(known.finding.level):
                    known.finding = found
                    changes.append(Change(found, False))
            elif len(self._known) < MOST_KNOWN:
                self._known[key] = _Known(found)
                self._returns[key] = self._returns.get(key, 0) + 1
                if self._returns[key] <= MOST_RETURNS:
                    changes.append(Change(found, False))
        made = set(checks) - _LASTING
        for key in [key for key in self._known if key not in seen and key[0] in made]:
            known = self._known[key]
            known.calm += 1
            if known.calm >= CALM_LOOKS:
                del self._known[key]
                if self._returns[key] <= MOST_RETURNS:
                    changes.append(Change(known.finding, True))
        return changes


def _key(found: Finding) -> _Key:
    """What makes it the same: not its figures, nor where in the kernel something waits."""
    return found.check, found.where, HUNG if found.level == HUNG else found.what
