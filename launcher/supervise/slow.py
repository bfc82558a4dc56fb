"""PURE: whether a job's steps take far longer than they did, and who is waited for. Stacks must confirm it.

Ranks wait for each other in each step, so all are as slow as the slowest, and steps do not tell which that is.
What tells is where they are: over some rounds of stacks those that are waited for are hardly ever in a call of
torch.distributed and the rest mostly is; or, where that is not to be seen, they are apart from most of the ranks
in round after round (as ByteRobust counts outliers over rounds). Where nobody stands out nothing is said: a job
may have become slower as a whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from launcher.supervise.facts import RankFacts
from launcher.supervise.stacks import RankStacks
from launcher.supervise.waiting import is_with_peers

FACTOR = 1.8  # times what is usual: slow
OVER_FACTOR = 1.3  # and below this no longer
LASTS_S = 8.0  # for so long, before it is looked into
LEAST_STEPS = 6  # of the attempt
USUAL_LOOKS = 15  # from so many on they tell what is usual, before that the least of the ranks does
KEPT_LOOKS = 450
USUAL_S = 1800.0  # what lasts so long is usual from then on
RECENT_LOOKS = 6  # not counted: they may be slow already
AGAIN_S, MOST_AGAIN_S = 30.0, 1800.0  # after nobody stood out
ROUNDS = 8
LEAST_ROUND_S, MOST_ROUND_S = 0.4, 4.0
SELDOM, OFTEN = 0.35, 0.6  # of the rounds
LEAST_PART = 0.75  # of the rounds, or of the answers to them, that must be there


class Slow(NamedTuple):
    """Steps take long."""

    since_s: float
    takes_s: float  # each
    usual_s: float


class SlowDetector:
    """Of one job, through its attempts."""

    def __init__(self) -> None:
        self._usual: deque[float] = deque(maxlen=KEPT_LOOKS)
        self._least_s: dict[int, float] = {}  # of each rank
        self._begin()

    def _begin(self) -> None:
        self._slow_from_s: float | None = None
        self._held_until_s = 0.0
        self._again_s = AGAIN_S
        self._is_told = False
        self._takes_s = 0.0  # at the last look

    def new_attempt(self) -> None:
        """Ranks begin again, maybe others: what was usual is not known."""
        self._usual.clear()
        self._least_s.clear()
        self._begin()

    def look(self, facts: Iterable[RankFacts], now_s: float) -> Slow | None:
        """The newest facts. Returns: that steps take long, when it is to be looked into."""
        known = [each for each in facts if each.step_takes_s > 0.0 and each.steps >= LEAST_STEPS]
        if not known:
            return None
        if self._counts_otherwise(known):
            self._usual.clear()
            self._begin()
        takes_s = median(each.step_takes_s for each in known)
        self._takes_s = takes_s
        earlier = list(self._usual)[:-RECENT_LOOKS]
        least = [each.step_least_s for each in known if each.step_least_s > 0.0]
        if len(earlier) >= USUAL_LOOKS:
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
            self._usual.extend([takes_s] * (USUAL_LOOKS + RECENT_LOOKS))
        if self._is_told or now_s < self._held_until_s or now_s - self._slow_from_s < LASTS_S:
            return None
        return Slow(self._slow_from_s, takes_s, usual_s)

    def _counts_otherwise(self, facts: Sequence[RankFacts]) -> bool:
        """Whether a rank counts something else as a step than before: heartbeats in place of optimizers' steps.

        The least that a step takes only falls, else.
        """
        is_other = False
        for each in facts:
            if each.step_least_s > 0.0:
                is_other |= each.step_least_s > 1.01 * self._least_s.get(each.rank, each.step_least_s)
                self._least_s[each.rank] = each.step_least_s
        return is_other

    def judged(self, is_told: bool, now_s: float) -> None:
        """It was looked into: somebody was named, or nobody stood out."""
        self._is_told = is_told
        if not is_told and len(self._usual) < USUAL_LOOKS:
            # Known was only the least that steps had taken, which a queue in front of an accelerator makes small.
            self._usual.clear()
            self._usual.extend([self._takes_s] * (USUAL_LOOKS + RECENT_LOOKS))
        self._held_until_s = now_s + self._again_s
        self._again_s = min(MOST_AGAIN_S, 2 * self._again_s)

    def is_slow(self) -> bool:
        """At the last look."""
        return self._slow_from_s is not None


def round_s(number: int, takes_s: float) -> float:
    """Until the next round of stacks: together about one step, at odd intervals."""
    each_s = min(MOST_ROUND_S, max(LEAST_ROUND_S, takes_s / ROUNDS))
    return each_s * (0.75 + 0.5 * (number * 0.618 % 1.0))


class Rounds:
    """Where ranks were, over the rounds."""

    def __init__(self) -> None:
        self.count = 0
        self._with_peers: dict[int, int] = {}
        self._apart: dict[int, int] = {}
        self._seen: dict[int, int] = {}

    def take(self, stacks: Mapping[int, RankStacks]) -> None:
        """Those of one round."""
        self.count += 1
        places: dict[tuple[tuple[str, str], ...], list[int]] = {}
        for rank, each in stacks.items():
            if each.main:
                self._seen[rank] = self._seen.get(rank, 0) + 1
                self._with_peers[rank] = self._with_peers.get(rank, 0) + is_with_peers(each)
                places.setdefault(tuple((frame.file, frame.function) for frame in each.main), []).append(rank)
        most = max(places.values(), key=len, default=[])
        if 2 * len(most) > sum(map(len, places.values())):
            for ranks in places.values():
                for rank in ranks if ranks is not most else ():
                    self._apart[rank] = self._apart.get(rank, 0) + 1

    def find_slow(self, world_size: int) -> tuple[int, ...]:
        """Those that the rest waits for; () where nobody stands out, or too few rounds were made to tell."""
        if (
            self.count < LEAST_PART * ROUNDS
            or len(self._seen) < world_size
            or min(self._seen.values(), default=0) < LEAST_PART * self.count
        ):
            return ()
        ranks = sorted(self._seen)
        waits = [self._with_peers.get(rank, 0) / self._seen[rank] for rank in ranks]
        named = _split(ranks, waits)
        return named or _split(ranks, [1.0 - self._apart.get(rank, 0) / self.count for rank in ranks])


def _split(ranks: Sequence[int], shares: Sequence[float]) -> tuple[int, ...]:
    """The ranks with low shares, at most half of them, where all others have high ones."""
    low = tuple(rank for rank, share in zip(ranks, shares, strict=True) if share <= SELDOM)
    high = sum(share >= OFTEN for share in shares)
    return low if low and 2 * len(low) <= len(ranks) and len(low) + high == len(ranks) else ()
