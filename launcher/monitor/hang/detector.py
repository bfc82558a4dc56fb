"""Hang detection for a job. In: observations of all ranks. Out: a finding. Pure.

Progress is the count of ranks (steps, heartbeats) if any rank counts; else output that comes in a cadence. If
neither was ever seen, only stopped processes are reported. The longest healthy gap so far determines the limit of
a silence. At that limit it is a hang if all ranks are idle, or if some are idle and the rest spins. Ranks that
read or write, or that all compute, have a far longer limit. Their activity is judged over the last three quarters
of the limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite

from launcher.base.facts import Hang, HangKind, RankFacts
from launcher.monitor.hang.activity import CLOCK_JUMP_S, ObservedRank, Presence
from launcher.monitor.hang.idle_ranks import IdleRanks
from launcher.monitor.hang.progress import JobProgress
from launcher.monitor.hang.settings import HangSettings
from launcher.monitor.hang.silence import JUDGED_PART, Judgement, Length, Silence
from launcher.monitor.hang.stopped import StoppedRanks

# Before the first step, and at the end: some may still work or start while one is stuck already.
START_PART, END_PART = 0.5, 0.72


class HangDetector:
    """Hang detector for one job, through its attempts."""

    def __init__(self, world_size: int, settings: HangSettings | None = None) -> None:
        self._set = settings if settings is not None else HangSettings()
        self._progress = JobProgress(self._set)
        self._ranks = [ObservedRank() for _ in range(max(world_size, 0))]
        min_s = self._set.min_s
        self._idle_ranks = IdleRanks(START_PART * min_s, END_PART * min_s, self._set.late_s)
        self._begin()

    def _begin(self) -> None:
        self._any_ended = self._just_ended = False
        self._looked_s: float | None = None
        self._stopped = StoppedRanks(self._set.frozen_s)
        self._idle_ranks.begin()
        self._silence = Silence(self._set, None)

    def new_attempt(self, now_s: float, world_size: int | None = None) -> None:
        """Begin an attempt with new ranks: reset counters, keep the learned gaps."""
        if world_size is not None and world_size != len(self._ranks):
            self._ranks = [ObservedRank() for _ in range(max(world_size, 0))]
        for seen in self._ranks:
            seen.begin(None)
        self._progress.begin_attempt()
        self._begin()
        self._silence.from_s = now_s if isfinite(now_s) else None

    def ended(self, rank: int) -> None:
        """Note that a rank has ended and is not waited for any more."""
        if 0 <= rank < len(self._ranks) and self._ranks[rank].presence is not Presence.ENDED:
            self._ranks[rank].presence = Presence.ENDED
            self._any_ended = self._just_ended = True

    def lasts(self, hang: Hang) -> bool:
        """Return whether there was no progress since this was found."""
        if hang.kind in (HangKind.FROZEN, HangKind.STUCK_IN_KERNEL):
            return self._stopped.any_found()
        if hang.kind is HangKind.ALL_SPIN or hang.is_doubtful:
            return self._silence.all_work
        return self._idle_ranks.lasts if hang.is_early else self._silence.is_reported

    @property
    def has_stepped(self) -> bool:
        """Whether steps were counted in this attempt."""
        return self._progress.has_stepped

    def running(self) -> list[int]:
        """Return the ranks that have not ended, as far as is known."""
        return [rank for rank, seen in enumerate(self._ranks) if seen.presence is not Presence.ENDED]

    def limit_s(self) -> float | None:
        """Return the current limit of a silence, all being idle; None: no cadence was seen, no report follows."""
        return self._progress.limit_s(self._any_ended)

    def look(self, facts: Sequence[RankFacts], now_s: float) -> Hang | None:
        """Evaluate the newest facts; return a finding that was not reported yet."""
        if not isfinite(now_s):
            return None
        self._skip_unwatched(now_s)
        if self._silence.from_s is None:
            self._silence.from_s = now_s
        has_moved = self._take(facts, now_s)
        silence = self._silence
        assert silence.from_s is not None
        seen_s, late = self._seen_until(now_s)
        limit_s = self.limit_s()
        silence_s = 0.0 if seen_s is None else seen_s - silence.from_s
        if self._just_ended:  # the job continues to its end: from here on the usual limit counts
            self._just_ended, silence.ruled_until_s = False, now_s
        if silence.ruled_until_s > -inf and seen_s is not None:
            silence_s = min(silence_s, seen_s - silence.ruled_until_s)
        stuck_s = limit_s
        if limit_s is not None and silence_s >= limit_s:
            stuck_s = JUDGED_PART * limit_s  # the state is observed later than the last step
        stopped = self._find_stopped(stuck_s)
        if stopped is not None or self._stopped.any_found():
            return stopped
        if self._progress.has_stepped and not self._any_ended:
            self._idle_ranks.begin()
        else:
            idle = self._idle_ranks.look(self._ranks, now_s)
            if idle is not None:
                return idle
        if has_moved or limit_s is None or seen_s is None:
            return None
        silence.remember(self._ranks, seen_s, max(limit_s, silence_s / 2))
        if silence_s < limit_s:
            return None
        length = Length(seen_s, silence_s, limit_s, late)
        judged = silence.judge(self._ranks, length, self._any_ended)
        return silence.report(None if judged is None else self._to_hang(judged, length, silence.from_s), seen_s)

    # Input.

    def _skip_unwatched(self, now_s: float) -> None:
        """Exclude unobserved time (a suspended machine, a blocked caller) from the silence."""
        silence = self._silence
        if self._looked_s is not None and silence.from_s is not None:
            unwatched_s = now_s - self._looked_s - self._set.look_s
            if unwatched_s > 0.0:
                silence.from_s += unwatched_s
                silence.forget_facts()
            elif now_s < self._looked_s - CLOCK_JUMP_S:  # the clock was set back: recorded times are in its future
                self._progress.forget_last()
                self._silence = Silence(self._set, now_s)
        self._looked_s = now_s

    def _take(self, facts: Sequence[RankFacts], now_s: float) -> bool:
        """Take new facts; return whether the job made progress."""
        found = self._progress.take(facts, self._ranks, now_s, self._silence.is_excused)
        if found.any_ended:
            self._any_ended = self._just_ended = True
        for rank in found.stopped:
            self._stopped.suspect(rank)
        if found.moved_s is None:
            return False
        self._silence = Silence(self._set, found.moved_s)
        self._progress.learn(self._ranks)
        return True

    def _seen_until(self, now_s: float) -> tuple[float | None, int]:
        """Return when all ranks that are not late were last seen, and how many are late; None: no new facts."""
        times = []
        lost_s = now_s - self._set.gone_s
        for seen in self._ranks:
            if seen.facts is not None and seen.presence is Presence.HERE:
                at_s = seen.facts.at_s
                if at_s < lost_s:
                    seen.presence = Presence.LOST
                else:
                    times.append(at_s)
        if not times:
            return None, 0
        fresh_s = max(times) - self._set.late_s
        if fresh_s < now_s - 5 * self._set.late_s:
            return None, 0
        in_time = [at_s for at_s in times if at_s >= fresh_s]
        return min(*in_time, now_s), len(times) - len(in_time)

    # Evaluation.

    def _find_stopped(self, stuck_s: float | None) -> Hang | None:
        found = self._stopped.find(self._ranks, stuck_s)
        if self._stopped.any_found():
            self._silence.is_excused = True  # not a healthy gap
        if found is None:
            return None
        allowed_s = self._set.frozen_s if found.kind is HangKind.FROZEN else stuck_s or 0.0
        return Hang(found.kind, found.since_s, found.ranks, allowed_s, self._progress.longest_s, found.why)

    def _to_hang(self, judged: Judgement, length: Length, from_s: float) -> Hang:
        progress = self._progress
        why = f"no rank has {'made a step' if progress.counts_steps else 'printed anything'}"
        why += f" for {length.silence_s:.0f} s; "
        why += (
            f"the longest healthy gap was {progress.longest_s:.1f} s"
            if progress.has_gaps
            else "there was none before"
        )
        why += f"; {judged.what}"
        if length.late:
            why += f"; not seen lately: {length.late} of the ranks"
        allowed_s, longest_s = judged.allowed_s, progress.longest_s
        return Hang(judged.kind, from_s, judged.ranks, allowed_s, longest_s, why, is_doubtful=judged.is_doubtful)
