"""PURE: which groups of machines replay a job so that the one with a fault is found.

In: machines, how many a group needs, which groups failed. Out: the next round of groups, whom it may be. The first
two rounds are the dual-phase replay of ByteRobust (section 5.2): of machines 0 to M - 1 in groups of m, n = M / m,
first those with the same x // m, then those with the same x mod n. With m <= n the two groups that fail have one
machine in common. Ours: M need not be m * n (what is left over is filled up with machines of other groups, in a
round of its own), and with m > n more rounds follow, of one suspect each beside machines that are cleared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple


class Group(NamedTuple):
    """Machines that replay the job together."""

    number: int  # in the order of all that were planned
    machines: tuple[str, ...]


class Found(Enum):
    """What the rounds have shown."""

    OPEN = "open"  # another round tells more
    ONE = "one"  # one machine explains all that failed
    NONE = "none"  # no group failed: it does not come again, or needs more machines than a group has
    ALL = "all"  # every group failed: the job's matter, or the network's
    SEVERAL = "several"  # more than one machine, or they cannot be told apart


class Verdict(NamedTuple):
    """What the rounds have shown, and of whom."""

    found: Found
    suspects: tuple[str, ...]  # in their order


class Replay:
    """One search. Groups of a round share no machine, so they can run at the same time."""

    def __init__(self, machines: Sequence[str], size: int) -> None:
        """Raises: ValueError for what is no search."""
        self._machines = list(dict.fromkeys(machines))
        if len(self._machines) != len(machines):
            twice = next(each for place, each in enumerate(machines) if each in machines[:place])
            raise ValueError(f"{twice} is there twice")
        if size < 1 or size >= len(machines):
            most = len(machines) - 1
            raise ValueError(f"groups of {size} of {len(machines)} machines tell nothing: give 1 to {most}")
        self._size = size
        self._failed: dict[Group, bool] = {}
        self._count = 0
        self._is_over = False  # the last round told nothing
        whole = len(machines) - len(machines) % size
        self._planned = [
            self._cut([self._machines[at : at + size] for at in range(0, whole, size)]),
            self._cut(self._strided(self._machines[:whole])),
        ]
        if whole < len(machines):
            # The rest, filled up from the front: whom they take are others' members in the first two rounds.
            self._planned.append(self._cut([(self._machines[whole:] + self._machines)[:size]]))

    def planned(self) -> list[list[Group]]:
        """The rounds that are certain; more may follow."""
        return [groups[:] for groups in self._planned]

    def next_round(self) -> list[Group]:
        """The groups that are to run now; [] when nothing more can be learned."""
        if self._planned:
            return self._planned[0]
        verdict = self.verdict()
        if verdict.found is not Found.OPEN:
            return []
        suspects, cleared = list(verdict.suspects), list(self._in_order(self._passed()))
        groups = []
        while suspects and len(cleared) >= self._size - 1:
            groups.append([suspects.pop(0), *cleared[: self._size - 1]])
            del cleared[: self._size - 1]
        self._planned = [self._cut(groups)]
        return self._planned[0]

    def ran(self, failed: Mapping[int, bool]) -> None:
        """What became of the round: by number of the group. A group that is missing could not be tried."""
        known = len(self._failed)
        for group in self._planned.pop(0):
            if group.number in failed:
                self._failed[group] = failed[group.number]
        self._is_over = len(self._failed) == known

    def verdict(self) -> Verdict:
        """What is known by now."""
        failed = [set(group.machines) for group, is_bad in self._failed.items() if is_bad]
        passed = self._passed()
        if self._planned:
            return Verdict(Found.OPEN, self._in_order(set(self._machines) - passed))
        if not failed:
            return Verdict(Found.NONE, ())
        if len(failed) == len(self._failed) and len(failed) > 1:
            return Verdict(Found.ALL, ())
        common = set.intersection(*failed) - passed
        if any(group - passed == common for group in failed) and len(common) == 1:
            return Verdict(Found.ONE, self._in_order(common))
        if common:
            # One of them, if it is one: each is tried alone among machines that are cleared, if there are so many.
            can_tell = len(passed) >= self._size - 1 and not self._is_over
            return Verdict(Found.OPEN if can_tell else Found.SEVERAL, self._in_order(common))
        return Verdict(Found.SEVERAL, self._in_order(set[str]().union(*failed) - passed))

    def _passed(self) -> set[str]:
        return set[str]().union(*(group.machines for group, is_bad in self._failed.items() if not is_bad))

    def _strided(self, machines: Sequence[str]) -> list[list[str]]:
        count = len(machines) // self._size
        return [list(machines[place::count]) for place in range(count)]

    def _cut(self, groups: Iterable[Sequence[str]]) -> list[Group]:
        made = []
        for machines in groups:
            made.append(Group(self._count, tuple(machines)))
            self._count += 1
        return made

    def _in_order(self, machines: set[str]) -> tuple[str, ...]:
        return tuple(each for each in self._machines if each in machines)
