"""PURE: which groups of machines replay a job so that the faulty one is found.

In: machines, the size of a group, the groups that failed. Out: the next round of groups, the suspects. The first
two rounds are the dual-phase replay of ByteRobust (section 5.2): of machines 0 to M - 1 in groups of m, n = M / m,
first those with the same x // m, then those with the same x mod n. With m <= n the two groups that fail have one
machine in common. Bootseer extends this. M need not be m * n: the remaining machines are filled up with machines
of other groups, in a round of their own. With m > n more rounds follow, of one suspect each beside cleared
machines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class ReplayGroup(NamedTuple):
    """Machines that replay the job together."""

    number: int  # in the order of planning
    machines: tuple[str, ...]


class SearchState(Enum):
    """The state of a search after some rounds."""

    OPEN = "open"  # another round can show more
    ONE = "one"  # one machine explains all that failed
    NONE = "none"  # no group failed: the fault does not recur, or needs more machines than a group has
    ALL = "all"  # every group failed: the job or the network is at fault
    SEVERAL = "several"  # more than one machine, or they cannot be distinguished


class Verdict(NamedTuple):
    """The state of a search and its suspects."""

    found: SearchState
    suspects: tuple[str, ...]  # in their order


class ReplaySearch:
    """One search. Groups of a round share no machine, so they can run at the same time."""

    def __init__(self, machines: Sequence[str], size: int) -> None:
        """Raises: ValueError for invalid machines or sizes."""
        self._machines = list(dict.fromkeys(machines))
        if len(self._machines) != len(machines):
            twice = next(each for place, each in enumerate(machines) if each in machines[:place])
            raise ValueError(f"{twice} is listed twice")
        if size < 1 or size >= len(machines):
            most = len(machines) - 1
            raise ValueError(f"groups of {size} of {len(machines)} machines show nothing: give 1 to {most}")
        self._size = size
        self._failed: dict[ReplayGroup, bool] = {}
        self._count = 0
        self._is_over = False  # the last round showed nothing
        whole = len(machines) - len(machines) % size
        self._planned = [
            self._cut([self._machines[at : at + size] for at in range(0, whole, size)]),
            self._cut(self._strided(self._machines[:whole])),
        ]
        if whole < len(machines):
            # The rest, filled up from the front with machines that are in other groups in the first two rounds.
            self._planned.append(self._cut([(self._machines[whole:] + self._machines)[:size]]))

    def planned(self) -> list[list[ReplayGroup]]:
        """Return the rounds that are certain; more may follow."""
        return [groups[:] for groups in self._planned]

    def next_round(self) -> list[ReplayGroup]:
        """Return the groups to run now; [] when nothing more can be learned."""
        if self._planned:
            return self._planned[0]
        verdict = self.verdict()
        if verdict.found is not SearchState.OPEN:
            return []
        suspects, cleared = list(verdict.suspects), list(self._in_order(self._passed()))
        groups = []
        while suspects and len(cleared) >= self._size - 1:
            groups.append([suspects.pop(0), *cleared[: self._size - 1]])
            del cleared[: self._size - 1]
        self._planned = [self._cut(groups)]
        return self._planned[0]

    def ran(self, failed: Mapping[int, bool]) -> None:
        """Record the results of the round, by number of the group. A missing group could not be run."""
        known = len(self._failed)
        for group in self._planned.pop(0):
            if group.number in failed:
                self._failed[group] = failed[group.number]
        self._is_over = len(self._failed) == known

    def verdict(self) -> Verdict:
        """Return the verdict so far."""
        failed = [set(group.machines) for group, is_bad in self._failed.items() if is_bad]
        passed = self._passed()
        if self._planned:
            return Verdict(SearchState.OPEN, self._in_order(set(self._machines) - passed))
        if not failed:
            return Verdict(SearchState.NONE, ())
        if len(failed) == len(self._failed) and len(failed) > 1:
            return Verdict(SearchState.ALL, ())
        common = set.intersection(*failed) - passed
        if any(group - passed == common for group in failed) and len(common) == 1:
            return Verdict(SearchState.ONE, self._in_order(common))
        if common:
            # If it is one machine, it is one of these: each runs with cleared machines only, if there are enough.
            can_tell = len(passed) >= self._size - 1 and not self._is_over
            return Verdict(SearchState.OPEN if can_tell else SearchState.SEVERAL, self._in_order(common))
        return Verdict(SearchState.SEVERAL, self._in_order(set[str]().union(*failed) - passed))

    def _passed(self) -> set[str]:
        return set[str]().union(*(group.machines for group, is_bad in self._failed.items() if not is_bad))

    def _strided(self, machines: Sequence[str]) -> list[list[str]]:
        count = len(machines) // self._size
        return [list(machines[place::count]) for place in range(count)]

    def _cut(self, groups: Iterable[Sequence[str]]) -> list[ReplayGroup]:
        made = []
        for machines in groups:
            made.append(ReplayGroup(self._count, tuple(machines)))
            self._count += 1
        return made

    def _in_order(self, machines: set[str]) -> tuple[str, ...]:
        return tuple(each for each in self._machines if each in machines)
