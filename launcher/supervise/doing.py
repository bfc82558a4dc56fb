"""What ranks do while they make no progress: nothing, work, or spin. Pure.

Each rank is measured by what it uses while the job makes progress: a rank of a job on GPUs may need a hundredth of
a core for its work, and a stuck rank with a progress bar's thread uses as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import isfinite

from launcher.supervise.facts import RankFacts

# A stuck rank has threads that live on: watchdogs, progress bars, senders of metrics. What these use lies between
# the bounds, and a fifth of what the rank uses while healthy is a sign of work within them.
PART_OF_USUAL = 0.2
LEAST_CORES, MOST_CORES = 0.003, 0.08
LEAST_IO_BPS, MOST_IO_BPS = 4096.0, 65536.0
UNKNOWN_CORES = 0.05  # where it was never seen healthy
# Below this a rank never works where we can see it (a server, a coordinator): that it is idle says nothing.
NEVER_WORKS_CORES = 0.006
USUAL_S = 120.0  # over how long what is usual is averaged
CLOCK_JUMP_S = 30.0


class Doing(Enum):
    """What a rank did in a stretch of time."""

    IDLE = "idle"
    BUSY = "busy"  # CPU, but nothing read or written: computes or spins
    WORKING = "working"  # reads or writes: that is no standstill
    NOTHING_USUAL = "as idle as ever"
    UNSEEN = "unseen"


class Presence(Enum):
    """Whether a rank counts."""

    HERE = "here"
    LOST = "lost"  # not heard of for long; it may come back
    ENDED = "ended"


class SeenRank:
    """One rank: its newest facts, and what it uses while the job makes progress."""

    __slots__ = ("facts", "held", "moved", "presence", "usual_cores", "usual_io_bps", "usual_s")

    def __init__(self) -> None:
        self.facts: RankFacts | None = None
        # The first facts with the state that it has been in since, or the last with which it moved all the same.
        self.held: RankFacts | None = None
        self.moved: RankFacts | None = None  # its facts when the job last made progress
        self.presence = Presence.HERE
        self.usual_cores = 0.0
        self.usual_io_bps = 0.0
        self.usual_s = 0.0  # how long it was watched for that

    def begin(self, facts: RankFacts | None) -> None:
        """A process begins, or a clock jumped: nothing can be compared with what was before."""
        self.facts = self.held = facts
        self.moved = None
        self.presence = Presence.HERE

    def learn(self, old: RankFacts, new: RankFacts) -> None:
        """What it used between the two is usual."""
        past_s = new.at_s - old.at_s
        cores, io_bps = rates(old, new)
        if cores < 0.0:
            return
        self.usual_s += past_s
        part = min(1.0, past_s / min(self.usual_s, USUAL_S))
        self.usual_cores += part * (cores - self.usual_cores)
        self.usual_io_bps += part * (io_bps - self.usual_io_bps)

    def held_s(self) -> float:
        """How long its main thread has been in this state, as far as was seen."""
        return 0.0 if self.facts is None or self.held is None else self.facts.at_s - self.held.at_s

    def held_from_s(self) -> float:
        """When it was first seen in this state."""
        return 0.0 if self.held is None else self.held.at_s

    def wait(self) -> str:
        """The kernel function in which it waits; "": none, or it cannot be seen."""
        return "" if self.facts is None else self.facts.wait

    def did(self, old: RankFacts | None, least_s: float) -> Doing:
        """What it did since `old`; UNSEEN when that is less than `least_s` ago."""
        new = self.facts
        if old is None or new is None or new.at_s - old.at_s < least_s:
            return Doing.UNSEEN
        cores, io_bps = rates(old, new)
        if io_bps >= self._least_io_bps():
            return Doing.WORKING
        if cores < 0.0:
            return Doing.BUSY  # for all that is known
        if cores >= self.least_cores():
            return Doing.BUSY
        return Doing.NOTHING_USUAL if self._never_works() else Doing.IDLE

    def is_here(self) -> bool:
        """Whether it runs, as far as is known."""
        return self.presence is Presence.HERE

    def _never_works(self) -> bool:
        return self.usual_s > 0.0 and self.usual_cores < NEVER_WORKS_CORES

    def least_cores(self) -> float:
        """From how many cores on it counts as busy."""
        if self.usual_s <= 0.0:
            return UNKNOWN_CORES
        return min(max(PART_OF_USUAL * self.usual_cores, LEAST_CORES), MOST_CORES)

    def may_have_worked(self, old: RankFacts | None) -> bool:
        """Whether it used as much since `old` as work of a second would."""
        new = self.facts
        if old is None or new is None:
            return False
        return new.cpu_s - old.cpu_s >= self.least_cores() or new.io_bytes - old.io_bytes >= self._least_io_bps()

    def worked_s(self, old: RankFacts | None, new: RankFacts | None, by_cpu: bool) -> float:
        """How much of the time between two facts it worked: all or nothing. Without `by_cpu`: read or wrote."""
        if old is None or new is None or new.at_s <= old.at_s:
            return 0.0
        cores, io_bps = rates(old, new)
        worked = io_bps >= self._least_io_bps() or (by_cpu and cores >= self.least_cores())
        return new.at_s - old.at_s if worked else 0.0

    def _least_io_bps(self) -> float:
        return min(max(PART_OF_USUAL * self.usual_io_bps, LEAST_IO_BPS), MOST_IO_BPS)


def rates(old: RankFacts, new: RankFacts) -> tuple[float, float]:
    """Cores and bytes a second between the two; below 0: cannot be seen. Its own output is no work."""
    past_s = new.at_s - old.at_s
    if past_s <= 0.0:
        return -1.0, -1.0
    cores = (new.cpu_s - old.cpu_s) / past_s if old.cpu_s >= 0.0 and new.cpu_s >= old.cpu_s else -1.0
    io_bps = -1.0
    if 0 <= old.io_bytes <= new.io_bytes:
        printed = new.output_bytes - old.output_bytes if 0 <= old.output_bytes <= new.output_bytes else 0
        io_bps = (new.io_bytes - old.io_bytes - printed) / past_s
    return (cores if isfinite(cores) else -1.0), io_bps


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Ranks for people: in full where they are few."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''})"
