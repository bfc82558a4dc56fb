"""PURE: detection of steps that take far longer than before, and of the slow ranks. Stacks must confirm it.

Ranks wait for each other in each step, so all are as slow as the slowest, and step times do not identify it. Its
place in the code does: over some rounds of stacks the awaited ranks are hardly ever in a call of
torch.distributed, and the rest mostly is. If that is not observable, they are apart from most ranks in round after
round (as ByteRobust counts outliers over rounds). If no rank stands out, nothing is reported: the job may have
become slower as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from launcher.base.facts import RankFacts
from launcher.monitor.hang.waiting import is_in_collective
from launcher.monitor.samples.stacks import RankStacks

FACTOR = 1.8  # times the usual value: slow
OVER_FACTOR = 1.3  # and below this no longer slow
LASTS_S = 8.0  # minimum duration before it is examined
MIN_STEPS = 6  # of the attempt
USUAL_SAMPLES = 15  # samples that define the usual value; before that the ranks' minimum does
KEPT_SAMPLES = 450
USUAL_S = 1800.0  # a value that lasts this long becomes usual
RECENT_SAMPLES = 6  # not counted: they may be slow already
AGAIN_S, MAX_AGAIN_S = 30.0, 1800.0  # after a round in which no rank stood out
ROUNDS = 8
MIN_ROUND_S, MAX_ROUND_S = 0.4, 4.0
SELDOM, OFTEN = 0.35, 0.6  # of the rounds
MIN_PART = 0.75  # of the rounds, or of their answers, that are required


class SlowSteps(NamedTuple):
    """The finding that steps take long."""

    since_s: float
    takes_s: float  # each
    usual_s: float


class SlowDetector:
    """Detector for one job, through its attempts."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=KEPT_SAMPLES)
        self._min_s: dict[int, float] = {}  # minimum of each rank
        self._begin()

    def _begin(self) -> None:
        self._slow_from_s: float | None = None
        self._held_until_s = 0.0
        self._again_s = AGAIN_S
        self._is_told = False
        self._takes_s = 0.0  # at the last sample

    def new_attempt(self) -> None:
        """Begin an attempt, perhaps with other ranks: usual values are unknown."""
        self._usual.clear()
        self._min_s.clear()
        self._begin()

    def look(self, facts: Iterable[RankFacts], now_s: float) -> SlowSteps | None:
        """Evaluate the newest facts. Return a finding if slow steps are to be examined."""
        known = [each for each in facts if each.step_takes_s > 0.0 and each.steps >= MIN_STEPS]
        if not known:
            return None
        if self._counts_otherwise(known):
            self._usual.clear()
            self._begin()
        takes_s = median(each.step_takes_s for each in known)
        self._takes_s = takes_s
        earlier = list(self._usual)[:-RECENT_SAMPLES]
        least = [each.step_least_s for each in known if each.step_least_s > 0.0]
        if len(earlier) >= USUAL_SAMPLES:
            usual_s = median(earlier)
        elif least:
            usual_s = median(least)
        else:
            usual_s = takes_s
        if takes_s < FACTOR * usual_s:
            self._slow_from_s = None
            self._usual.append(takes_s)
            if takes_s < OVER_FACTOR * usual_s:
                self._is_told, self._again_s = False, AGAIN_S
            return None
        if self._slow_from_s is None:
            self._slow_from_s = now_s
        if now_s - self._slow_from_s >= USUAL_S:
            self._usual.clear()
            self._usual.extend([takes_s] * (USUAL_SAMPLES + RECENT_SAMPLES))
        if self._is_told or now_s < self._held_until_s or now_s - self._slow_from_s < LASTS_S:
            return None
        return SlowSteps(self._slow_from_s, takes_s, usual_s)

    def _counts_otherwise(self, facts: Sequence[RankFacts]) -> bool:
        """Return whether a rank counts other steps than before: heartbeats instead of optimizer steps.

        Otherwise the minimum time of a step only decreases.
        """
        is_other = False
        for each in facts:
            if each.step_least_s > 0.0:
                is_other |= each.step_least_s > 1.01 * self._min_s.get(each.rank, each.step_least_s)
                self._min_s[each.rank] = each.step_least_s
        return is_other

    def judged(self, is_told: bool, now_s: float) -> None:
        """Note the result of the examination: ranks were named, or none stood out."""
        self._is_told = is_told
        if not is_told and len(self._usual) < USUAL_SAMPLES:
            # Only the minimum step time was known, which a queue in front of an accelerator makes small.
            self._usual.clear()
            self._usual.extend([self._takes_s] * (USUAL_SAMPLES + RECENT_SAMPLES))
        self._held_until_s = now_s + self._again_s
        self._again_s = min(MAX_AGAIN_S, 2 * self._again_s)

    def is_slow(self) -> bool:
        """Return whether steps were slow at the last sample."""
        return self._slow_from_s is not None


def round_s(number: int, takes_s: float) -> float:
    """Return the seconds until the next round of stacks: together about one step, at irregular intervals."""
    each_s = min(MAX_ROUND_S, max(MIN_ROUND_S, takes_s / ROUNDS))
    return each_s * (0.75 + 0.5 * (number * 0.618 % 1.0))


class StackRounds:
    """The places of ranks in the code, over the rounds."""

    def __init__(self) -> None:
        self.count = 0
        self._with_peers: dict[int, int] = {}
        self._apart: dict[int, int] = {}
        self._seen: dict[int, int] = {}

    def take(self, stacks: Mapping[int, RankStacks]) -> None:
        self.count += 1
        places: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for rank, each in stacks.items():
            if each.main:
                self._seen[rank] = self._seen.get(rank, 0) + 1
                self._with_peers[rank] = self._with_peers.get(rank, 0) + is_in_collective(each)
                places.setdefault(tuple((frame.file, frame.function) for frame in each.main), []).append(rank)
        most = max(places.values(), key=len, default=[])
        if 2 * len(most) > sum(map(len, places.values())):
            for ranks in places.values():
                for rank in ranks if ranks is not most else ():
                    self._apart[rank] = self._apart.get(rank, 0) + 1

    def find_slow(self, world_size: int) -> tuple[int, ...]:
        """Return the ranks that the rest waits for; () if none stands out, or there were too few rounds."""
        if (
            self.count < MIN_PART * ROUNDS
            or len(self._seen) < world_size
            or min(self._seen.values(), default=0) < MIN_PART * self.count
        ):
            return ()
        ranks = sorted(self._seen)
        waits = [self._with_peers.get(rank, 0) / self._seen[rank] for rank in ranks]
        named = _split(ranks, waits)
        return named or _split(ranks, [1.0 - self._apart.get(rank, 0) / self.count for rank in ranks])


def _split(ranks: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """Return the ranks with low shares, at most half of all, if all others have high ones."""
    low = tuple(rank for rank, share in zip(ranks, shares, strict=True) if share <= SELDOM)
    high = sum(share >= OFTEN for share in shares)
    return low if low and 2 * len(low) <= len(ranks) and len(low) + high == len(ranks) else ()
