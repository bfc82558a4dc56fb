"""Whether a job stands still: what is seen of all ranks in, a finding out. Pure.

Progress is what ranks count (steps, heartbeats) where any of them counts; else output that comes in a cadence;
where neither was ever seen, only stopped processes are told of. The longest healthy gap so far sets how long
nothing may come. At that limit it is a hang when all are idle, or when some are idle and the rest spins; ranks
that read or write, or all compute, have far longer. What they do is judged over the last three quarters of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from math import inf, isfinite
from typing import NamedTuple

from launcher.supervise.cadence import Cadence
from launcher.supervise.doing import CLOCK_JUMP_S, LEAST_IO_BPS, Doing, Presence, SeenRank, ranks_in_words, rates
from launcher.supervise.facts import Hang, HangKind, RankFacts
from launcher.supervise.idle_ranks import IdleRanks
from launcher.supervise.stopped import STOPPED, StoppedRanks

ASKED_PART = 0.82  # of what is allowed: by then looks and questions begin, so that it is told in time
# Before the first step, and at the end: others may work on, or be still starting, while one is stuck already.
START_PART, END_PART = 0.5, 0.72
JUDGED_PART = 0.75  # of the limit: what ranks did shortly after the last step is not looked at
WORKED_PART = 0.4  # of the limit: threads that work on after the last step, and looks between which they stop
PAUSE_PART = 1.5  # of the time that ranks worked before: so long they must be idle before that is a hang
SAMPLE = 64  # ranks of which each moment of a silence is looked at
SNAPSHOTS = 12  # in one limit
# Threads that only wait use that much, such as 2 ms a second for each process group of gloo on a slow machine, and
# ranks with an accelerator need no more for their work: by CPU they are not told apart.
LITTLE_CORES = 0.05
# Kernel functions in which a process waits for another one, as far as names tell.
WAITS_FOR_OTHERS = ("futex", "poll", "sk_wait", "wait_woken", "inet_csk", "tcp_", "unix_stream")


class AllowedSilence(NamedTuple):
    """A phase in which nothing may come for longer: an evaluation, a checkpoint."""

    name: str
    seconds: float  # that the silence may last while the phase is on


class HangSettings(NamedTuple):
    """How long is too long, in seconds."""

    least_s: float = 15.0  # a hang is told within this,
    factor: float = 3.0  # or within so many times the longest healthy gap so far, where that is more
    first_s: float = 1800.0  # before the first steps of an attempt: imports, downloads, compilation
    busy_s: float = 900.0  # while all compute or spin: compilation, autotuning
    working_s: float = 3600.0  # while some read or write
    ending_s: float = 120.0  # once ranks have ended: the rest cleans up
    frozen_s: float = 5.0  # how long a process is stopped before that is told
    late_s: float = 6.0  # facts that are older than the newest by more are late
    gone_s: float = 60.0  # a rank that is not heard of for longer is not waited for
    look_s: float = 10.0  # time between looks beyond this was not watched and does not count
    asks_busy: bool = False  # what all do that only work is asked about at the usual limit: ALL_SPIN
    steps_needed: int = 3  # gaps between steps before they are a cadence
    outputs_needed: int = 10  # gaps between outputs before they are one: they may be a server's
    output_busy_part: float = 0.8  # and ranks work in that part of the time
    allowed: tuple[AllowedSilence, ...] = ()


class HangDetector:
    """Follows one job through its attempts."""

    def __init__(self, world_size: int, settings: HangSettings | None = None) -> None:
        self._set = settings if settings is not None else HangSettings()
        self._seconds = {rule.name: rule.seconds for rule in self._set.allowed}
        self._steps = Cadence(self._set.working_s)
        self._outputs = Cadence(self._set.working_s)
        self._looks = self._busy_looks = 0  # while nothing but output was known
        self._ranks = [SeenRank() for _ in range(max(world_size, 0))]
        least_s = self._set.least_s
        self._idle_ranks = IdleRanks(START_PART * least_s, END_PART * least_s, self._set.late_s)
        self._begin()

    def _begin(self) -> None:
        self._promised = False  # something counts steps in this attempt
        self._attempt_steps = False  # and some were made
        self._any_ended = self._just_ended = False
        self._looked_s: float | None = None
        self._allowed_until_s: dict[str, float] = {}
        self._stopped = StoppedRanks(self._set.frozen_s)
        self._idle_ranks.begin()
        self._restart_silence(None)

    def new_attempt(self, now_s: float, world_size: int | None = None) -> None:
        """All ranks begin again: counters are forgotten, what was learned of gaps is kept."""
        if world_size is not None and world_size != len(self._ranks):
            self._ranks = [SeenRank() for _ in range(max(world_size, 0))]
        for seen in self._ranks:
            seen.begin(None)
        self._steps.begin_attempt()
        self._outputs.begin_attempt()
        self._begin()
        self._silent_from_s = now_s if isfinite(now_s) else None

    def allow(self, name: str, until_s: float) -> bool:
        """Switches a rule of `allowed` on until then, or off (a time that is past); False: no such rule."""
        if name not in self._seconds or until_s != until_s:
            return False
        self._allowed_until_s[name] = until_s
        return True

    def ended(self, rank: int) -> None:
        """A rank has ended and is waited for no more."""
        if 0 <= rank < len(self._ranks) and self._ranks[rank].presence is not Presence.ENDED:
            self._ranks[rank].presence = Presence.ENDED
            self._any_ended = self._just_ended = True

    def progressed(self, at_s: float) -> None:
        """Progress that the caller knows of in another way."""
        if isfinite(at_s):
            self._promised = self._attempt_steps = True
            self._note(self._steps, at_s, at_s, 1)

    def lasts(self, hang: Hang) -> bool:
        """Whether there was no progress since this was found."""
        if hang.kind in (HangKind.FROZEN, HangKind.STUCK_IN_KERNEL):
            return self._stopped.any_found()
        if hang.kind is HangKind.ALL_SPIN or hang.is_doubtful:
            return self._all_work
        return self._idle_ranks.lasts if hang.is_early else self._reported is not None

    @property
    def has_stepped(self) -> bool:
        """Whether steps were counted in this attempt."""
        return self._attempt_steps

    def running(self) -> list[int]:
        """Ranks that have not ended, as far as is known."""
        return [rank for rank, seen in enumerate(self._ranks) if seen.presence is not Presence.ENDED]

    def limit_s(self) -> float | None:
        """How long nothing may come now, all idle; None: no cadence was ever seen, nothing will be said."""
        steps, outputs = self._steps, self._outputs
        if self._promised or steps.gaps:
            known = self._attempt_steps and steps.gaps >= self._set.steps_needed
            limit_s = self._allowed_s(steps) if known else self._set.first_s
        elif (
            outputs.gaps >= self._set.outputs_needed
            and self._busy_looks >= self._set.output_busy_part * self._looks
        ):
            limit_s = self._allowed_s(outputs)
            if outputs.attempt_gaps < self._set.outputs_needed:  # lines of a start are no cadence yet
                limit_s = max(limit_s, self._set.first_s)
        else:
            return None
        if self._any_ended:
            limit_s = max(limit_s, self._set.ending_s)
        return limit_s

    def _allowed_s(self, cadence: Cadence) -> float:
        return ASKED_PART * max(self._set.least_s, self._set.factor * cadence.longest_s)

    def look(self, facts: Sequence[RankFacts], now_s: float) -> Hang | None:
        """Takes the newest facts; a finding when there is one that was not told yet."""
        if not isfinite(now_s):
            return None
        self._skip_unwatched(now_s)
        if self._silent_from_s is None:
            self._silent_from_s = now_s
        moved = self._take(facts, now_s)
        if moved:
            self._learn()
        seen_s, late = self._seen_until(now_s)
        limit_s = self.limit_s()
        silence_s = 0.0 if seen_s is None else seen_s - self._silent_from_s
        on_s = [self._seconds[name] for name, until_s in self._allowed_until_s.items() if until_s > now_s]
        if on_s:
            self._excused, self._ruled_until_s = True, now_s
            if limit_s is not None:
                limit_s = max(limit_s, *on_s)
        if self._just_ended:  # the job goes on to its end
            self._just_ended, self._ruled_until_s = False, now_s
        if not on_s and self._ruled_until_s > -inf and seen_s is not None:
            # What was allowed has ended: from here on the usual limit counts.
            silence_s = min(silence_s, seen_s - self._ruled_until_s)
        stuck_s = limit_s
        if limit_s is not None and silence_s >= limit_s:
            stuck_s = JUDGED_PART * limit_s  # the state is seen later than the last step
        stopped = self._find_stopped(stuck_s)
        if stopped is not None or self._stopped.any_found():
            return stopped
        if self._attempt_steps and not self._any_ended:
            self._idle_ranks.begin()
        elif not on_s:
            idle = self._idle_ranks.look(self._ranks, now_s)
            if idle is not None:
                return idle
        if moved or limit_s is None or seen_s is None:
            return None
        self._remember(seen_s, max(limit_s, silence_s / 2))
        if silence_s < limit_s:
            return None
        return self._tell(self._judge(seen_s, silence_s, limit_s, late), seen_s)

    # What is taken in.

    def _skip_unwatched(self, now_s: float) -> None:
        """Time in which nobody looked (a suspended machine, a caller that stood) is no silence."""
        if self._looked_s is not None and self._silent_from_s is not None:
            unwatched_s = now_s - self._looked_s - self._set.look_s
            if unwatched_s > 0.0:
                self._silent_from_s += unwatched_s
                self._history.clear()
            elif now_s < self._looked_s - CLOCK_JUMP_S:  # the clock was set back: known moments are in its future
                self._steps.forget_last()
                self._outputs.forget_last()
                self._restart_silence(now_s)
        self._looked_s = now_s

    def _restart_silence(self, from_s: float | None) -> None:
        self._silent_from_s = from_s
        self._excused = False  # the gap in progress teaches nothing
        self._ruled_until_s = -inf
        self._reported: Hang | None = None
        self._all_work = False  # as was found beyond the limit
        self._changed: tuple[HangKind, tuple[int, ...], float] | None = None
        self._history: deque[tuple[float, list[RankFacts | None]]] = deque()

    def _note(self, cadence: Cadence, first_s: float, last_s: float, count: int) -> bool:
        """Progress of the kind that counts; whether it is news."""
        if not cadence.note(first_s, last_s, count, self._excused):
            return False
        self._restart_silence(last_s)
        return True

    def _take(self, given: Sequence[RankFacts], now_s: float) -> bool:
        """Compares facts with those before; whether the job made progress."""
        step_first_s = output_first_s = inf
        step_last_s = output_last_s = -inf
        known_s = self._steps.last_s
        busy = watched = 0
        most = 1  # steps of one rank
        for facts in given:
            rank = facts.rank
            # Facts of the future are those of a clock that is not mapped yet.
            if not 0 <= rank < len(self._ranks) or not isfinite(facts.at_s) or facts.at_s > now_s + CLOCK_JUMP_S:
                continue
            seen = self._ranks[rank]
            if seen.presence is Presence.ENDED:
                continue
            if facts.state in ("Z", "X", "x"):
                self.ended(rank)
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
                    if known_s is None:  # the attempt's first look at it: all its steps lie before
                        most = max(most, facts.steps)
                continue
            if facts.at_s <= old.at_s:
                continue
            seen.facts = facts
            seen.presence = Presence.HERE
            if seen.held is None or facts.state != seen.held.state or _moved(seen, old, facts):
                seen.held = facts
            if facts.state in STOPPED:
                self._stopped.suspect(rank)
            count = facts.steps - max(old.steps, 0)
            if count > 0:
                moment_s = _step_moment(facts, old.at_s)
                if old.steps > 0:
                    each_s = (moment_s - _step_moment(old, -inf)) / count
                    if each_s > 0.0:
                        self._steps.note_typical(each_s)
                # It had made none of these at the facts before. What was known already is no gap's end.
                if known_s is None or moment_s > known_s:
                    first_s = max(moment_s - (count - 1) * self._steps.typical_s, min(old.at_s, moment_s))
                    step_first_s, step_last_s = min(step_first_s, first_s), max(step_last_s, moment_s)
                    most = max(most, count)
            elif facts.output_bytes > old.output_bytes >= 0:
                output_first_s, output_last_s = min(output_first_s, facts.at_s), max(output_last_s, facts.at_s)
            if not self._attempt_steps:
                watched += 1
                cores, io_bps = rates(old, facts)
                busy += cores >= LEAST_BUSY_CORES or io_bps >= LEAST_IO_BPS
        if watched:
            self._looks += 1
            self._busy_looks += 2 * busy >= watched
        if step_last_s > -inf:
            self._attempt_steps = True
            first_s = step_first_s if known_s is None else max(step_first_s, known_s)
            return self._note(self._steps, first_s, step_last_s, most)
        if output_last_s > -inf and not self._attempt_steps:
            if self._outputs.last_s is not None and output_last_s > self._outputs.last_s:
                self._outputs.note_typical(output_last_s - self._outputs.last_s)
            return self._note(self._outputs, output_first_s, output_last_s, 1)
        return False

    def _learn(self) -> None:
        """What ranks used since the last progress before this one is usual, if nothing else lay between.

        Only once there is progress again: what they use in a silence may be what they use in a hang.
        """
        cadence = self._steps if self._attempt_steps else self._outputs
        last_s, typical_s = cadence.last_s, cadence.typical_s
        for seen in self._ranks:
            old, new = seen.moved, seen.facts
            if last_s is not None and old is not None and new is not None:
                past_s = new.at_s - old.at_s
                is_whole = past_s <= max(LEARNED_S, 2.5 * typical_s)
                if is_whole and new.at_s - last_s <= max(1.5 * typical_s, MOST_IDLE_PART * past_s):
                    seen.learn(old, new)
            seen.moved = new

    def _seen_until(self, now_s: float) -> tuple[float | None, int]:
        """Until when all ranks were seen that are not late, and how many are late; None: nothing is new."""
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

    def _remember(self, seen_s: float, limit_s: float) -> None:
        """Keeps facts of this silence to compare with, about `SNAPSHOTS` in one limit."""
        history = self._history
        if history and seen_s - history[-1][0] < limit_s / SNAPSHOTS:
            return
        history.append((seen_s, [seen.facts for seen in self._ranks]))
        # The first one stays: it tells how much of the silence was work.
        while len(history) > 4 * SNAPSHOTS:
            del history[1]

    # What is made of it.

    def _find_stopped(self, stuck_s: float | None) -> Hang | None:
        found = self._stopped.find(self._ranks, stuck_s)
        if self._stopped.any_found():
            self._excused = True  # no healthy gap
        if found is None:
            return None
        allowed_s = self._set.frozen_s if found.kind is HangKind.FROZEN else stuck_s or 0.0
        return Hang(found.kind, found.since_s, found.ranks, allowed_s, self._longest_s(), found.why)

    def _judge(self, seen_s: float, silence_s: float, limit_s: float, late: int) -> Hang | None:
        """What the silence is, beyond its limit."""
        if late and silence_s < 2 * limit_s:
            return None  # they may be the ones that work
        did = self._did(seen_s, limit_s)
        idle = [rank for rank, what in enumerate(did) if what is Doing.IDLE]
        if idle:
            # What was done in this silence before was healthy: an evaluation's ranks end one after the other, and
            # pause.
            busy = [rank for rank, what in enumerate(did) if what is Doing.BUSY]
            worked_s = max(self._worked_s(idle, True), self._worked_s(busy, False))
            if worked_s > WORKED_PART * limit_s:
                did = self._did(seen_s, max(limit_s, PAUSE_PART * worked_s) / JUDGED_PART)
        by = {what: [rank for rank, did_it in enumerate(did) if did_it is what] for what in Doing}
        idle, busy, quiet = by[Doing.IDLE], by[Doing.BUSY], by[Doing.NOTHING_USUAL]
        if by[Doing.WORKING]:
            allowed_s = max(limit_s, self._set.working_s)
            if silence_s < allowed_s:
                return None
            return self._hang(HangKind.ALL_BUSY, (), "some still read or write", silence_s, allowed_s, late)
        if not busy:
            if not idle and not quiet:
                return None
            if self._any_ended:
                return self._hang(HangKind.ALL_IDLE, *self._not_ended(), silence_s, limit_s, late)
            apart, what = self._apart_by_wait(idle or quiet)
            return self._hang(HangKind.ALL_IDLE, apart, "all wait idle" + what, silence_s, limit_s, late)
        if idle:
            fewer = self._choose_apart(idle, busy)
            what = f"{ranks_in_words(busy)} busy, {ranks_in_words(idle)} idle"
            return self._hang(HangKind.ONE_APART, tuple(fewer), what, silence_s, limit_s, late)
        allowed_s = max(limit_s, self._set.busy_s)
        if silence_s >= allowed_s:
            return self._hang(HangKind.ALL_BUSY, (), "all compute or spin", silence_s, allowed_s, late)
        if self._all_work or late or self._any_ended or not self._set.asks_busy:
            return None
        self._all_work = True
        if max(self._cores(busy, seen_s, limit_s), default=0.0) < LITTLE_CORES:
            found = self._hang(HangKind.ALL_IDLE, (), "all use little of their CPUs", silence_s, limit_s, late)
            return found._replace(is_doubtful=True)
        return self._hang(HangKind.ALL_SPIN, (), "all compute or spin", silence_s, limit_s, late)

    def _not_ended(self) -> tuple[tuple[int, ...], str]:
        """Those that have not ended, where they are fewer than the others; and that in words."""
        left = tuple(rank for rank, seen in enumerate(self._ranks) if seen.presence is not Presence.ENDED)
        ended = len(self._ranks) - len(left)
        what = f"{ended} of {len(self._ranks)} ranks have ended, the rest waits idle"
        return (left if len(left) < ended else ()), what

    def _cores(self, ranks: Sequence[int], seen_s: float, limit_s: float) -> list[float]:
        """What these used in the last part of the limit."""
        then = self._snapshot(seen_s - JUDGED_PART * limit_s)
        pairs = [(then[rank], self._ranks[rank].facts) for rank in ranks]
        return [inf if old is None or new is None else rates(old, new)[0] for old, new in pairs]

    def _snapshot(self, before_s: float) -> list[RankFacts | None]:
        then = self._history[0][1]
        for at_s, snapshot in self._history:
            if at_s > before_s:
                break
            then = snapshot
        return then

    def _did(self, seen_s: float, limit_s: float) -> list[Doing]:
        """What each rank did in the last part of the limit."""
        part_s = JUDGED_PART * limit_s
        then = self._snapshot(seen_s - part_s)
        return [
            Doing.UNSEEN if not seen.is_here() or rank >= len(then) else seen.did(then[rank], part_s / 2)
            for rank, seen in enumerate(self._ranks)
        ]

    def _worked_s(self, ranks: list[int], by_cpu: bool) -> float:
        """For how long any of these ranks worked in this silence; without `by_cpu`: read or wrote."""
        first = self._history[0][1]
        did = [rank for rank in ranks if not by_cpu or self._ranks[rank].may_have_worked(first[rank])]
        return max(
            (
                sum(
                    self._ranks[rank].worked_s(then[rank], now[rank], by_cpu)
                    for (_, then), (_, now) in pairwise(self._history)
                )
                for rank in did[:: len(did) // SAMPLE + 1]
            ),
            default=0.0,
        )

    def _choose_apart(self, idle: list[int], busy: list[int]) -> list[int]:
        """Those to blame: the fewer; of as many, the busy ones while the idle ones wait for others."""
        if len(idle) != len(busy):
            return min(idle, busy, key=len)
        waits = [self._ranks[rank].wait() for rank in idle]
        return busy if all(any(name in wait for name in WAITS_FOR_OTHERS) for wait in waits) else idle

    def _apart_by_wait(self, idle: list[int]) -> tuple[tuple[int, ...], str]:
        """Those few that have waited elsewhere in the kernel than the rest, and that in words."""
        then = self._history[-2 if len(self._history) > 1 else -1][1]
        by_wait: dict[str, list[int]] = {}
        for rank in idle:
            wait, before = self._ranks[rank].wait(), then[rank]
            if not wait or before is None or before.wait != wait:
                return (), ""
            by_wait.setdefault(wait, []).append(rank)
        most = max(by_wait, key=lambda wait: len(by_wait[wait]))
        apart = tuple(sorted(rank for wait, ranks in by_wait.items() if wait != most for rank in ranks))
        if not apart or len(apart) > max(1, len(idle) // 4):
            return (), f" in {most}" if not apart else ""
        waits = sorted({self._ranks[rank].wait() for rank in apart})
        return apart, f", {ranks_in_words(apart)} in {', '.join(waits)}, the rest in {most}"

    def _hang(
        self, kind: HangKind, apart: tuple[int, ...], what: str, silence_s: float, limit_s: float, late: int
    ) -> Hang:
        assert self._silent_from_s is not None
        steps_count = self._promised or self._attempt_steps or self._steps.gaps > 0
        why = f"no rank has {'made a step' if steps_count else 'printed anything'} for {silence_s:.0f} s; "
        gaps = (self._steps if steps_count else self._outputs).gaps
        why += f"the longest healthy gap was {self._longest_s():.1f} s" if gaps else "there was none before"
        why += f"; {what}"
        if late:
            why += f"; not seen lately: {late} of the ranks"
        return Hang(kind, self._silent_from_s, apart, limit_s, self._longest_s(), why)

    def _longest_s(self) -> float:
        return (self._steps if self._promised or self._steps.gaps else self._outputs).longest_s

    def _tell(self, found: Hang | None, seen_s: float) -> Hang | None:
        """The finding, when it is new, or differs from the last one and has done so for a while."""
        told = self._reported
        if found is not None and (found.kind is HangKind.ALL_SPIN or found.is_doubtful):
            return found if told is None else None  # a question, which hides no other finding
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


LEARNED_S = 12.0  # between two looks with progress; beyond there was a pause
MOST_IDLE_PART = 0.3  # of the time that is learned from may lie after the last progress
LEAST_BUSY_CORES = 0.01  # that a rank uses in a look while it is more than asleep


def _fell(old: RankFacts, new: RankFacts) -> bool:
    """Whether counters show another process than before."""
    # Children that end take their CPU time along, so less of it means nothing when it is a little less.
    return 0 <= new.steps < old.steps or 0 <= new.output_bytes < old.output_bytes


def _step_moment(facts: RankFacts, before_s: float) -> float:
    """When the newest step was: as it was told where that can be, else when it was seen."""
    told_s = facts.step_at_s
    return told_s if isfinite(told_s) and max(before_s - 1.0, 0.0) <= told_s <= facts.at_s + 1.0 else facts.at_s


def _moved(seen: SeenRank, old: RankFacts, new: RankFacts) -> bool:
    """Whether a rank did anything between the two that one which is stopped, or stuck in the kernel, does not do.

    Processes that a stopped rank has started go on, and what its threads do while one is stuck is little.
    """
    if new.steps > old.steps:
        return True
    if new.state != "D":
        return False
    cores, io_bps = rates(old, new)
    return cores >= seen.least_cores() or io_bps >= LEAST_IO_BPS
