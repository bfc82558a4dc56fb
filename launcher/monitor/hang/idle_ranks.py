"""PURE: whether ranks are fully idle before the job's first step, or after other ranks have ended.

Usual values are not known there. So this is no finding but a reason to inspect the ranks' stacks (waiting.py).
They show at once a rank that sleeps while others wait for it, but not one that waits for a service.
"""

from __future__ import annotations

from collections.abc import Sequence

from launcher.base.facts import Hang, HangKind, RankFacts
from launcher.monitor.hang.activity import MIN_IO_BPS, ObservedRank, Presence

IDLE_CORES = 0.02  # used by threads of libraries while the rank waits
SPARE_CPU_S, SPARE_BYTES = 0.05, 65536  # a burst that does not count as work


class IdleRanks:
    """Idle ranks of one job, through its attempts."""

    def __init__(self, start_s: float, end_s: float, fresh_s: float) -> None:
        """Args: start_s, end_s: minimum idle time; fresh_s: maximum age of facts."""
        self._start_s, self._end_s, self._fresh_s = start_s, end_s, fresh_s
        self._idle_from: list[RankFacts | None] = []
        self._since_s: list[float] = []
        self._seen_s: list[float] = []  # when each was sampled last
        self._reported_s: float | None = None  # start of the idle time that was reported

    @property
    def lasts(self) -> bool:
        """Whether no rank has worked since that was reported."""
        return self._reported_s is not None

    def begin(self) -> None:
        """Begin another attempt."""
        self._idle_from, self._since_s, self._seen_s = [], [], []
        self._reported_s = None

    def look(self, ranks: Sequence[ObservedRank], now_s: float) -> Hang | None:
        """Return a hang if all running ranks are idle, once."""
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
                )  # between two samples
            self._seen_s[place] = facts.at_s
            since_s = max(since_s, self._since_s[place])
            seen_s = min(seen_s, facts.at_s)
        if self._reported_s is not None and since_s > self._reported_s:
            self._reported_s = None
        if ended == len(ranks) or self._reported_s is not None or now_s - seen_s > self._fresh_s:
            return None
        min_s = self._end_s if ended else self._start_s
        if seen_s - since_s < min_s:
            return None
        self._reported_s = since_s
        kind = HangKind.NOT_ENDED if ended else HangKind.NOT_STARTED
        return Hang(kind, since_s, (), min_s, 0.0, "", is_early=True)


def _has_worked(old: RankFacts, new: RankFacts) -> bool:
    past_s = new.at_s - old.at_s
    return (
        new.steps > max(old.steps, 0)
        or new.output_bytes != old.output_bytes
        or new.cpu_s - old.cpu_s > IDLE_CORES * past_s + SPARE_CPU_S
        or new.io_bytes - old.io_bytes > MIN_IO_BPS * past_s + SPARE_BYTES
    )
