"""The activity of ranks while they make no progress: none, work, or spinning. Pure.

Each rank is compared with its own use while the job makes progress: a rank of a job on GPUs may need a hundredth
of a core for its work, and a stuck rank with a progress bar's thread uses as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from math import isfinite

from launcher.base.facts import RankFacts

# A stuck rank has threads that continue: watchdogs, progress bars, senders of metrics. Their use lies between the
# bounds, and a fifth of the rank's use while healthy is a sign of work within them.
PART_OF_USUAL = 0.2
MIN_CORES, MAX_CORES = 0.003, 0.08
MIN_IO_BPS, MAX_IO_BPS = 4096.0, 65536.0
UNKNOWN_CORES = 0.05  # if it was never seen healthy
# Below this a rank never works visibly (a server, a coordinator): that it is idle means nothing.
NEVER_WORKS_CORES = 0.006
USUAL_S = 120.0  # interval over which usual values are averaged
CLOCK_JUMP_S = 30.0


class Activity(Enum):
    """The activity of a rank in an interval."""

    IDLE = "idle"
    BUSY = "busy"  # CPU, but nothing read or written: computes or spins
    WORKING = "working"  # reads or writes: that is no hang
    NOTHING_USUAL = "as idle as ever"
    UNSEEN = "unseen"


class Presence(Enum):
    """Whether a rank is considered."""

    HERE = "here"
    LOST = "lost"  # no facts for long; it may come back
    ENDED = "ended"


class ObservedRank:
    """One rank: its newest facts, and its use while the job makes progress."""

    __slots__ = ("facts", "held", "moved", "presence", "usual_cores", "usual_io_bps", "usual_s")

    def __init__(self) -> None:
        self.facts: RankFacts | None = None
        # The first facts with its present state, or the last ones in this state that show activity.
        self.held: RankFacts | None = None
        self.moved: RankFacts | None = None  # its facts when the job last made progress
        self.presence = Presence.HERE
        self.usual_cores = 0.0
        self.usual_io_bps = 0.0
        self.usual_s = 0.0  # observation time for these

    def begin(self, facts: RankFacts | None) -> None:
        """Start over: the process is new, or a clock jumped, so earlier facts are not comparable."""
        self.facts = self.held = facts
        self.moved = None
        self.presence = Presence.HERE

    def learn(self, old: RankFacts, new: RankFacts) -> None:
        """Learn its use between the two as usual."""
        past_s = new.at_s - old.at_s
        cores, io_bps = rates(old, new)
        if cores < 0.0:
            return
        self.usual_s += past_s
        part = min(1.0, past_s / min(self.usual_s, USUAL_S))
        self.usual_cores += part * (cores - self.usual_cores)
        self.usual_io_bps += part * (io_bps - self.usual_io_bps)

    def held_s(self) -> float:
        """Return how long its main thread has been in this state, as far as observed."""
        return 0.0 if self.facts is None or self.held is None else self.facts.at_s - self.held.at_s

    def held_from_s(self) -> float:
        """Return when it was first seen in this state."""
        return 0.0 if self.held is None else self.held.at_s

    def wait(self) -> str:
        """Return the kernel function in which it waits; "": none, or unknown."""
        return "" if self.facts is None else self.facts.wait

    def did(self, old: RankFacts | None, min_s: float) -> Activity:
        """Return its activity since `old`; UNSEEN if that is less than `min_s` ago."""
        new = self.facts
        if old is None or new is None or new.at_s - old.at_s < min_s:
            return Activity.UNSEEN
        cores, io_bps = rates(old, new)
        if io_bps >= self._min_io_bps():
            return Activity.WORKING
        if cores < 0.0:
            return Activity.BUSY  # as far as is known
        if cores >= self.min_cores():
            return Activity.BUSY
        return Activity.NOTHING_USUAL if self._never_works() else Activity.IDLE

    def is_here(self) -> bool:
        """Return whether it runs, as far as is known."""
        return self.presence is Presence.HERE

    def _never_works(self) -> bool:
        return self.usual_s > 0.0 and self.usual_cores < NEVER_WORKS_CORES

    def min_cores(self) -> float:
        """Return the minimum cores of a busy rank."""
        if self.usual_s <= 0.0:
            return UNKNOWN_CORES
        return min(max(PART_OF_USUAL * self.usual_cores, MIN_CORES), MAX_CORES)

    def may_have_worked(self, old: RankFacts | None) -> bool:
        """Return whether it used as much since `old` as one second of work would."""
        new = self.facts
        if old is None or new is None:
            return False
        return new.cpu_s - old.cpu_s >= self.min_cores() or new.io_bytes - old.io_bytes >= self._min_io_bps()

    def worked_s(self, old: RankFacts | None, new: RankFacts | None, by_cpu: bool) -> float:
        """Return the work time between two facts: all or nothing. Without `by_cpu`: time with I/O."""
        if old is None or new is None or new.at_s <= old.at_s:
            return 0.0
        cores, io_bps = rates(old, new)
        worked = io_bps >= self._min_io_bps() or (by_cpu and cores >= self.min_cores())
        return new.at_s - old.at_s if worked else 0.0

    def _min_io_bps(self) -> float:
        return min(max(PART_OF_USUAL * self.usual_io_bps, MIN_IO_BPS), MAX_IO_BPS)


def rates(old: RankFacts, new: RankFacts) -> tuple[float, float]:
    """Return cores and bytes a second between the two; below 0: unknown. Its own output is no work."""
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
    """Format ranks for users: all of them if they are few."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"{len(ranks)} ranks ({', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''})"
