"""PURE: whether ranks do nothing at all before the job's first step, or once others of it have ended.

What is usual is not known there. So this is no finding but a reason to look at the ranks' stacks (waiting.py): of
one that sleeps while others wait for it they tell at once; of one that waits for a service they do not.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.supervise.doing import LEAST_IO_BPS, Presence, SeenRank
from launcher.supervise.facts import Hang, HangKind, RankFacts

IDLE_CORES = 0.02  # that threads of libraries use while the rank waits
SPARE_CPU_S, SPARE_BYTES = 0.05, 65536  # a burst that is no work


class IdleRanks:
    """Of one job, through its attempts."""

    def __init__(self, start_s: float, end_s: float, fresh_s: float) -> None:
        """Args: start_s, end_s: how long they must be idle; fresh_s: how old facts may be."""
        self._start_s, self._end_s, self._fresh_s = start_s, end_s, fresh_s
        self._idle_from: list[RankFacts | None] = []
        self._since_s: list[float] = []
        self._seen_s: list[float] = []  # when each was looked at last
        self._told_s: float | None = None  # since when they had been idle, when that was told

    @property
    def lasts(self) -> bool:
        """Whether nothing was done since that was told."""
        return self._told_s is not None

    def begin(self) -> None:
        """Another attempt."""
        self._idle_from, self._since_s, self._seen_s = [], [], []
        self._told_s = None

    def look(self, ranks: Sequence[SeenRank], now_s: float) -> Hang | None:
        """Returns: that all that run are idle, once."""
        ended = sum(seen.presence is Presence.ENDED for seen in ranks)
        if len(self._idle_from) != len(ranks):
            self._idle_from = [None] * len(ranks)
            self._since_s, self._seen_s = [0.0] * len(ranks), [0.0] * len(ranks)
        since_s, seen_s = -1.0, now_s
        for place, seen in enumerate(ranks):
            if seen.presence is Presence.ENDED:
                continue
            facts, before = seen.facts, self._idle_from[place]
            if facts is None or not seen.is_here() or facts.cpu_s < 0.0 or facts.state != "S":
                self.begin()
                return None
            if before is None or facts.at_s < before.at_s or _has_worked(before, facts):
                last_s = facts.at_s if before is None else min(self._seen_s[place], facts.at_s)
                self._idle_from[place], self._since_s[place] = (
                    facts,
                    (last_s + facts.at_s) / 2,
                )  # between two looks
            self._seen_s[place] = facts.at_s
            since_s = max(since_s, self._since_s[place])
            seen_s = min(seen_s, facts.at_s)
        if self._told_s is not None and since_s > self._told_s:
            self._told_s = None
        if ended == len(ranks) or self._told_s is not None or now_s - seen_s > self._fresh_s:
            return None
        least_s = self._end_s if ended else self._start_s
        if seen_s - since_s < least_s:
            return None
        self._told_s = since_s
        kind = HangKind.NOT_ENDED if ended else HangKind.NOT_STARTED
        return Hang(kind, since_s, (), least_s, 0.0, "", is_early=True)


def _has_worked(old: RankFacts, new: RankFacts) -> bool:
    past_s = new.at_s - old.at_s
    return (
        new.steps > max(old.steps, 0)
        or new.output_bytes != old.output_bytes
        or new.cpu_s - old.cpu_s > IDLE_CORES * past_s + SPARE_CPU_S
        or new.io_bytes - old.io_bytes > LEAST_IO_BPS * past_s + SPARE_BYTES
    )
