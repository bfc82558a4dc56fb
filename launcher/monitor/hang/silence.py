"""PURE: what the ranks did in a silence of the job, and what that shows: a hang, work or nothing yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import inf
from typing import NamedTuple

from launcher.base.facts import Hang, HangKind, RankFacts
from launcher.monitor.hang.activity import Activity, ObservedRank, Presence, ranks_in_words, rates
from launcher.monitor.hang.settings import HangSettings

JUDGED_PART = 0.75  # of the limit: activity shortly after the last step is ignored
WORKED_PART = 0.4  # of the limit: threads may work on after the last step, and stop between two samples
PAUSE_PART = 1.5  # of the time that ranks worked before: minimum idle time of a hang
SAMPLE = 64  # ranks whose samples of a silence are all evaluated
SNAPSHOTS = 12  # in one limit
# Threads that only wait use that much, such as 2 ms a second for each process group of gloo on a slow machine.
# Ranks with an accelerator need no more for their work, so CPU use does not distinguish them.
LITTLE_CORES = 0.05
# Kernel functions in which a process waits for another one, as far as names show it.
WAITS_FOR_OTHERS = ("futex", "poll", "sk_wait", "wait_woken", "inet_csk", "tcp_", "unix_stream")


class Length(NamedTuple):
    """How long a silence is, as far as ranks were seen."""

    seen_s: float  # when all ranks that are not late were last seen
    silence_s: float
    limit_s: float  # all being idle
    late: int  # ranks without new facts


class Judgement(NamedTuple):
    """What ranks do in a silence beyond its limit."""

    kind: HangKind
    ranks: tuple[int, ...]  # to blame
    what: str
    allowed_s: float
    is_doubtful: bool = False


class Silence:
    """The time since the last progress of a job."""

    def __init__(self, settings: HangSettings, from_s: float | None) -> None:
        self._set = settings
        self.from_s = from_s  # None: since the first look
        self.is_excused = False  # this gap is not learned
        self.ruled_until_s = -inf  # until then it had a limit of its own
        self.all_work = False  # found beyond the limit
        self._reported: Hang | None = None
        self._changed: tuple[HangKind, tuple[int, ...], float] | None = None
        self._history: deque[tuple[float, list[RankFacts | None]]] = deque()

    @property
    def is_reported(self) -> bool:
        return self._reported is not None

    def forget_facts(self) -> None:
        """Forget what the ranks did: time has passed unobserved."""
        self._history.clear()

    def remember(self, ranks: Sequence[ObservedRank], seen_s: float, limit_s: float) -> None:
        """Keep facts of this silence for comparison, about `SNAPSHOTS` in one limit."""
        history = self._history
        if history and seen_s - history[-1][0] < limit_s / SNAPSHOTS:
            return
        history.append((seen_s, [seen.facts for seen in ranks]))
        # The first one stays: it shows how much of the silence was work.
        while len(history) > 4 * SNAPSHOTS:
            del history[1]

    def judge(self, ranks: Sequence[ObservedRank], length: Length, any_ended: bool) -> Judgement | None:
        """Classify a silence beyond its limit. Args: any_ended: ranks have ended in this attempt."""
        seen_s, silence_s, limit_s, late = length
        if late and silence_s < 2 * limit_s:
            return None  # the late ranks may be those that work
        did = self._did(ranks, seen_s, limit_s)
        idle = [rank for rank, what in enumerate(did) if what is Activity.IDLE]
        if idle:
            # Earlier work in this silence was healthy: an evaluation's ranks end one after the other, and pause.
            busy = [rank for rank, what in enumerate(did) if what is Activity.BUSY]
            worked_s = max(self._worked_s(ranks, idle, True), self._worked_s(ranks, busy, False))
            if worked_s > WORKED_PART * limit_s:
                did = self._did(ranks, seen_s, max(limit_s, PAUSE_PART * worked_s) / JUDGED_PART)
        by = {what: [rank for rank, did_it in enumerate(did) if did_it is what] for what in Activity}
        idle, busy, quiet = by[Activity.IDLE], by[Activity.BUSY], by[Activity.NOTHING_USUAL]
        if by[Activity.WORKING]:
            allowed_s = max(limit_s, self._set.working_s)
            if silence_s < allowed_s:
                return None
            return Judgement(HangKind.ALL_BUSY, (), "some still read or write", allowed_s)
        if not busy:
            if not idle and not quiet:
                return None
            if any_ended:
                return Judgement(HangKind.ALL_IDLE, *_not_ended(ranks), limit_s)
            apart, what = self._apart_by_wait(ranks, idle or quiet)
            return Judgement(HangKind.ALL_IDLE, apart, "all wait idle" + what, limit_s)
        if idle:
            fewer = _choose_apart(ranks, idle, busy)
            what = f"{ranks_in_words(busy)} busy, {ranks_in_words(idle)} idle"
            return Judgement(HangKind.ONE_APART, tuple(fewer), what, limit_s)
        allowed_s = max(limit_s, self._set.busy_s)
        if silence_s >= allowed_s:
            return Judgement(HangKind.ALL_BUSY, (), "all compute or spin", allowed_s)
        if self.all_work or late or any_ended or not self._set.asks_busy:
            return None
        self.all_work = True
        if max(self._cores(ranks, busy, seen_s, limit_s), default=0.0) < LITTLE_CORES:
            return Judgement(HangKind.ALL_IDLE, (), "all use little of their CPUs", limit_s, is_doubtful=True)
        return Judgement(HangKind.ALL_SPIN, (), "all compute or spin", limit_s)

    def _cores(
        self, ranks: Sequence[ObservedRank], chosen: list[int], seen_s: float, limit_s: float
    ) -> list[float]:
        """Return the cores that these ranks used in the last part of the limit."""
        then = self._snapshot(seen_s - JUDGED_PART * limit_s)
        pairs = [(then[rank], ranks[rank].facts) for rank in chosen]
        return [inf if old is None or new is None else rates(old, new)[0] for old, new in pairs]

    def _snapshot(self, before_s: float) -> list[RankFacts | None]:
        then = self._history[0][1]
        for at_s, snapshot in self._history:
            if at_s > before_s:
                break
            then = snapshot
        return then

    def _did(self, ranks: Sequence[ObservedRank], seen_s: float, limit_s: float) -> list[Activity]:
        """Return each rank's activity in the last part of the limit."""
        part_s = JUDGED_PART * limit_s
        then = self._snapshot(seen_s - part_s)
        return [
            Activity.UNSEEN if not seen.is_here() or rank >= len(then) else seen.did(then[rank], part_s / 2)
            for rank, seen in enumerate(ranks)
        ]

    def _worked_s(self, ranks: Sequence[ObservedRank], chosen: list[int], by_cpu: bool) -> float:
        """Return how long any of these ranks worked in this silence; without `by_cpu`: read or wrote."""
        first = self._history[0][1]
        did = [rank for rank in chosen if not by_cpu or ranks[rank].may_have_worked(first[rank])]
        return max(
            (
                sum(
                    ranks[rank].worked_s(then[rank], now[rank], by_cpu)
                    for (_, then), (_, now) in pairwise(self._history)
                )
                for rank in did[:: len(did) // SAMPLE + 1]
            ),
            default=0.0,
        )

    def _apart_by_wait(self, ranks: Sequence[ObservedRank], idle: list[int]) -> tuple[tuple[int, ...], str]:
        """Return the few ranks that waited elsewhere in the kernel than the rest, and that in words."""
        then = self._history[-2 if len(self._history) > 1 else -1][1]
        by_wait: dict[str, list[int]] = {}
        for rank in idle:
            wait, before = ranks[rank].wait(), then[rank]
            if not wait or before is None or before.wait != wait:
                return (), ""
            by_wait.setdefault(wait, []).append(rank)
        most = max(by_wait, key=lambda wait: len(by_wait[wait]))
        apart = tuple(sorted(rank for wait, those in by_wait.items() if wait != most for rank in those))
        if not apart or len(apart) > max(1, len(idle) // 4):
            return (), f" in {most}" if not apart else ""
        waits = sorted({ranks[rank].wait() for rank in apart})
        return apart, f", {ranks_in_words(apart)} in {', '.join(waits)}, the rest in {most}"

    def report(self, found: Hang | None, seen_s: float) -> Hang | None:
        """Return the finding if it is new, or has differed from the last one for a while."""
        told = self._reported
        if found is not None and (found.kind is HangKind.ALL_SPIN or found.is_doubtful):
            return found if told is None else None  # a query, which hides no other finding
        if found is None or (told is not None and (told.kind, told.ranks) == (found.kind, found.ranks)):
            self._changed = None
            return None
        if told is not None:
            if self._changed is None or self._changed[:2] != (found.kind, found.ranks):
                self._changed = (found.kind, found.ranks, seen_s)
                return None
            if seen_s - self._changed[2] < self._set.frozen_s:
                return None
        self._reported, self._changed = found, None
        return found


def _not_ended(ranks: Sequence[ObservedRank]) -> tuple[tuple[int, ...], str]:
    """Return the ranks that have not ended, if they are the fewer; and that in words."""
    left = tuple(rank for rank, seen in enumerate(ranks) if seen.presence is not Presence.ENDED)
    ended = len(ranks) - len(left)
    what = f"{ended} of {len(ranks)} ranks have ended, the rest is idle"
    return (left if len(left) < ended else ()), what


def _choose_apart(ranks: Sequence[ObservedRank], idle: list[int], busy: list[int]) -> list[int]:
    """Return the ranks to blame: the fewer; if equal, the busy ones, if the idle ones wait for others."""
    if len(idle) != len(busy):
        return min(idle, busy, key=len)
    waits = [ranks[rank].wait() for rank in idle]
    return busy if all(any(name in wait for name in WAITS_FOR_OTHERS) for wait in waits) else idle
