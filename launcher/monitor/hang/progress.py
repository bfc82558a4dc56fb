"""PURE: what counts as progress of a job: the steps of its ranks, or their output if none counts steps.

In: facts of all ranks. Out: when the job made progress last, which silence is usual, and what each rank uses while
the job makes progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite
from typing import NamedTuple

from launcher.base.facts import RankFacts
from launcher.monitor.hang.activity import CLOCK_JUMP_S, MIN_IO_BPS, ObservedRank, Presence, rates
from launcher.monitor.hang.settings import HangSettings
from launcher.monitor.hang.stopped import STOPPED

QUERY_PART = 0.82  # of the limit: sampling and queries begin then, so that the report is in time
LEARNED_S = 12.0  # between two samples with progress; longer means a pause
MAX_IDLE_PART = 0.3  # the part of a learned interval that may lie after the last progress
MIN_BUSY_CORES = 0.01  # use of a rank in a sample that is more than sleep


class Cadence:
    """The learned gaps of one sort of progress, over all attempts.

    Gaps of training have several modes (steps of 0.05 s, an evaluation of 60 s, a checkpoint of 20 s). So only the
    longest gap so far is kept, no mean and no variance.
    """

    __slots__ = ("attempt_gaps", "gaps", "last_s", "longest_s", "max_s", "typical_s")

    def __init__(self, max_s: float) -> None:
        self.max_s = max_s  # longer gaps are not learned: one odd gap must not hide hangs for days
        self.gaps = self.attempt_gaps = 0
        self.longest_s = 0.0
        self.typical_s = 0.0  # time of a single event
        self.last_s: float | None = None  # in this attempt; None: none yet

    def note(self, first_s: float, last_s: float, count: int = 1, excused: bool = False) -> bool:
        """Record `count` events, the first at `first_s`, the last at `last_s`; return whether they are new.

        An excused gap was allowed or had its own cause, so it is not learned.
        """
        before_s = self.last_s
        if before_s is not None and last_s <= before_s:
            return False
        self.last_s = last_s
        gaps = count - (before_s is None)
        self.gaps += gaps
        self.attempt_gaps += gaps
        if before_s is not None:
            gap_s = min(first_s - before_s, self.max_s)
            if gap_s > self.longest_s and not excused:
                self.longest_s = gap_s
        return True

    def note_typical(self, each_s: float) -> None:
        """Track the median time of single events: an evaluation among them moves it little."""
        if self.typical_s <= 0.0:
            self.typical_s = each_s
        else:
            self.typical_s += 0.05 * (min(each_s, 3 * self.typical_s) - self.typical_s)

    def begin_attempt(self) -> None:
        """Restart counting; keep the learned gaps."""
        self.attempt_gaps = 0
        self.last_s = None

    def forget_last(self) -> None:
        """Forget the last event: the clock has changed, so the length of the current gap is unknown."""
        self.last_s = None


class NewFacts(NamedTuple):
    """What new facts show."""

    moved_s: float | None  # time of the newest progress; None: no new progress
    any_ended: bool  # a rank has ended
    stopped: list[int]  # ranks whose main thread is stopped, or in the kernel


class JobProgress:
    """The progress of one job, through its attempts."""

    def __init__(self, settings: HangSettings) -> None:
        self._set = settings
        self._steps = Cadence(settings.working_s)
        self._outputs = Cadence(settings.working_s)
        self._looks = self._busy_looks = 0  # while only output was known
        self._promised = False  # steps are counted in this attempt
        self._attempt_steps = False  # and some were made

    def begin_attempt(self) -> None:
        """Restart counting; keep the learned gaps."""
        self._steps.begin_attempt()
        self._outputs.begin_attempt()
        self._promised = self._attempt_steps = False

    def forget_last(self) -> None:
        """Forget the last progress: the clock has changed, so the length of the current gap is unknown."""
        self._steps.forget_last()
        self._outputs.forget_last()

    @property
    def has_stepped(self) -> bool:
        """Whether steps were counted in this attempt."""
        return self._attempt_steps

    @property
    def counts_steps(self) -> bool:
        """Whether steps are the progress, not output."""
        return self._promised or self._steps.gaps > 0

    @property
    def has_gaps(self) -> bool:
        """Whether a healthy gap was seen."""
        return self._cadence.gaps > 0

    @property
    def longest_s(self) -> float:
        """The longest healthy gap."""
        return self._cadence.longest_s

    @property
    def _cadence(self) -> Cadence:
        return self._steps if self.counts_steps else self._outputs

    def limit_s(self, any_ended: bool) -> float | None:
        """Return the current limit of a silence, all being idle; None: no cadence was seen, no report follows."""
        steps, outputs = self._steps, self._outputs
        if self._promised or steps.gaps:
            known = self._attempt_steps and steps.gaps >= self._set.steps_needed
            limit_s = self._allowed_s(steps) if known else self._set.first_s
        elif (
            outputs.gaps >= self._set.outputs_needed
            and self._busy_looks >= self._set.output_busy_part * self._looks
        ):
            limit_s = self._allowed_s(outputs)
            if outputs.attempt_gaps < self._set.outputs_needed:  # the output of a start is no cadence yet
                limit_s = max(limit_s, self._set.first_s)
        else:
            return None
        if any_ended:
            limit_s = max(limit_s, self._set.ending_s)
        return limit_s

    def _allowed_s(self, cadence: Cadence) -> float:
        return QUERY_PART * max(self._set.min_s, self._set.factor * cadence.longest_s)

    def take(
        self, given: Sequence[RankFacts], ranks: Sequence[ObservedRank], now_s: float, excused: bool
    ) -> NewFacts:
        """Compare facts with the previous ones, and keep them. Args: excused: the current gap is not learned."""
        any_ended, stopped = False, []
        step_first_s = output_first_s = inf
        step_last_s = output_last_s = -inf
        known_s = self._steps.last_s
        busy = watched = 0
        most = 1  # steps of one rank
        for facts in given:
            rank = facts.rank
            # Facts from the future have a clock that is not mapped yet.
            if not 0 <= rank < len(ranks) or not isfinite(facts.at_s) or facts.at_s > now_s + CLOCK_JUMP_S:
                continue
            seen = ranks[rank]
            if seen.presence is Presence.ENDED:
                continue
            if facts.state in ("Z", "X", "x"):
                seen.presence, any_ended = Presence.ENDED, True
                continue
            old = seen.facts
            if facts.steps >= 0 and not self._promised:
                self._promised = True
            if old is None or facts.at_s < old.at_s - CLOCK_JUMP_S or _fell(old, facts):
                seen.begin(facts)
                if facts.steps > 0:
                    moment_s = _step_moment(facts, -inf)
                    if known_s is None or moment_s > known_s:
                        step_first_s, step_last_s = min(step_first_s, moment_s), max(step_last_s, moment_s)
                    if known_s is None:  # the attempt's first sample of it: all its steps happened before
                        most = max(most, facts.steps)
                continue
            if facts.at_s <= old.at_s:
                continue
            seen.facts = facts
            seen.presence = Presence.HERE
            if seen.held is None or facts.state != seen.held.state or _moved(seen, old, facts):
                seen.held = facts
            if facts.state in STOPPED:
                stopped.append(rank)
            count = facts.steps - max(old.steps, 0)
            if count > 0:
                moment_s = _step_moment(facts, old.at_s)
                if old.steps > 0:
                    each_s = (moment_s - _step_moment(old, -inf)) / count
                    if each_s > 0.0:
                        self._steps.note_typical(each_s)
                # It made none of these before the previous facts. Known progress ends no gap.
                if known_s is None or moment_s > known_s:
                    first_s = max(moment_s - (count - 1) * self._steps.typical_s, min(old.at_s, moment_s))
                    step_first_s, step_last_s = min(step_first_s, first_s), max(step_last_s, moment_s)
                    most = max(most, count)
            elif facts.output_bytes > old.output_bytes >= 0:
                output_first_s, output_last_s = min(output_first_s, facts.at_s), max(output_last_s, facts.at_s)
            if not self._attempt_steps:
                watched += 1
                cores, io_bps = rates(old, facts)
                busy += cores >= MIN_BUSY_CORES or io_bps >= MIN_IO_BPS
        if watched:
            self._looks += 1
            self._busy_looks += 2 * busy >= watched
        if step_last_s > -inf:
            self._attempt_steps = True
            first_s = step_first_s if known_s is None else max(step_first_s, known_s)
            is_new = self._steps.note(first_s, step_last_s, most, excused)
            return NewFacts(step_last_s if is_new else None, any_ended, stopped)
        if output_last_s > -inf and not self._attempt_steps:
            if self._outputs.last_s is not None and output_last_s > self._outputs.last_s:
                self._outputs.note_typical(output_last_s - self._outputs.last_s)
            is_new = self._outputs.note(output_first_s, output_last_s, 1, excused)
            return NewFacts(output_last_s if is_new else None, any_ended, stopped)
        return NewFacts(None, any_ended, stopped)

    def learn(self, ranks: Sequence[ObservedRank]) -> None:
        """Learn what ranks used since the last progress as usual, if nothing else happened between.

        Only after progress: their use in a silence may be their use in a hang.
        """
        cadence = self._steps if self._attempt_steps else self._outputs
        last_s, typical_s = cadence.last_s, cadence.typical_s
        for seen in ranks:
            old, new = seen.moved, seen.facts
            if last_s is not None and old is not None and new is not None:
                past_s = new.at_s - old.at_s
                is_whole = past_s <= max(LEARNED_S, 2.5 * typical_s)
                if is_whole and new.at_s - last_s <= max(1.5 * typical_s, MAX_IDLE_PART * past_s):
                    seen.learn(old, new)
            seen.moved = new


def _fell(old: RankFacts, new: RankFacts) -> bool:
    """Return whether counters show another process than before."""
    # Ended children remove their CPU time, so slightly less of it means nothing.
    return 0 <= new.steps < old.steps or 0 <= new.output_bytes < old.output_bytes


def _step_moment(facts: RankFacts, before_s: float) -> float:
    """Return the time of the newest step: as reported if that is plausible, else as observed."""
    reported_s = facts.step_at_s
    return (
        reported_s
        if isfinite(reported_s) and max(before_s - 1.0, 0.0) <= reported_s <= facts.at_s + 1.0
        else facts.at_s
    )


def _moved(seen: ObservedRank, old: RankFacts, new: RankFacts) -> bool:
    """Return whether a rank was active between the two, unlike one that is stopped or stuck in the kernel.

    Children of a stopped rank continue, and the threads of a stuck rank do little.
    """
    if new.steps > old.steps:
        return True
    if new.state != "D":
        return False
    cores, io_bps = rates(old, new)
    return cores >= seen.min_cores() or io_bps >= MIN_IO_BPS
