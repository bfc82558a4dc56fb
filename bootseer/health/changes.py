"""Pure. Changes between rounds of checks of a node: new and ended findings, each reported once.

In: the findings of each round. Out: those that are new or worse, and those that are over. A finding that is absent
in only one round is not over yet. An intermittent finding is reported a few times only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bootseer.health.finding import BAD, HUNG, LEVELS, WARN, Finding

CALM_ROUNDS = 2  # rounds without a finding until it is over
MAX_REPORTS = 3  # reports of one finding; later ones are suppressed
MAX_KNOWN = 256
# Findings from kernel messages never end.
_LASTING = {"kernel-log"}

_Key = tuple[str, str, str]


class Change(NamedTuple):
    finding: Finding
    is_over: bool


class _KnownFinding:
    __slots__ = ("calm", "finding")

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        self.calm = 0  # rounds since it was last found


class Changes:
    def __init__(self) -> None:
        self._known: dict[_Key, _KnownFinding] = {}
        self._returns: dict[_Key, int] = {}

    def look(self, checks: Iterable[str], findings: Iterable[Finding]) -> list[Change]:
        """Return the changes of a round. Args: checks: those that ran; findings of others cannot be over."""
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
            elif len(self._known) < MAX_KNOWN:
                self._known[key] = _KnownFinding(found)
                self._returns[key] = self._returns.get(key, 0) + 1
                if self._returns[key] <= MAX_REPORTS:
                    changes.append(Change(found, False))
        made = set(checks) - _LASTING
        for key in [key for key in self._known if key not in seen and key[0] in made]:
            known = self._known[key]
            known.calm += 1
            if known.calm >= CALM_ROUNDS:
                del self._known[key]
                if self._returns[key] <= MAX_REPORTS:
                    changes.append(Change(known.finding, True))
        return changes


def _key(found: Finding) -> _Key:
    """Return the identity of a finding, without its figures and the kernel function of a wait."""
    return found.check, found.where, HUNG if found.level == HUNG else found.what
