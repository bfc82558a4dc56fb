"""PURE: events of a job -> analyses of its starts, from which reports, exports and comparisons are made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bootseer.counted import counted
from bootseer.errors import UsageError
from bootseer.events import EVENTS_DROPPED, Event
from bootseer.report.critical_path import Arrivals, PathStep, find_path
from bootseer.report.measures import StageMeasures, measure, split_waits
from bootseer.report.pieces import PEERS, WAITING, Piece, Pieces, end_of, rank_times
from bootseer.report.starts import (
    BACKOFF,
    FIRST_STEP,
    RENDEZVOUS,
    RankStart,
    Start,
    list_attempts,
    make_start,
    split_attempts,
)
from bootseer.report.stragglers import Straggler, find_stragglers

MAX_NOTES = 20
_SAME_FOR_ALL = (
    BACKOFF,
    RENDEZVOUS,
    WAITING,
    FIRST_STEP,
)  # stages of the critical path that no single node makes slow


class LostTime(NamedTuple):
    """Accelerator-seconds, one accelerator a rank, from the job's first event to the rank's first step."""

    total_s: float
    by_label: dict[str, float]
    ranks: int  # with an observed first step
    unseen_ranks: int
    unseen_s: float  # of the unseen ranks, until they ended or were last seen
    straggler_s: float  # of the start: by how much the critical path exceeds the medians
    straggler_lost_s: float  # the same for all ranks


class Analysis(NamedTuple):
    start: Start
    pieces: dict[RankStart, list[Piece]]
    waited_s: dict[RankStart, float]  # waiting for the last rank, in scripts: inferred
    stages: list[StageMeasures]
    path: list[PathStep]
    stragglers: list[Straggler]
    lost: LostTime
    first_step_s: float | None  # of the last rank; None unless all were observed
    start_s: float  # the same, or until the last event of the start
    end_s: float  # the last event of the attempt

    def times_of(self, rank: RankStart) -> dict[str, float]:
        """Return a rank's seconds by stage, with the wait for the last rank apart from the rest of its script."""
        times, waited_s = rank_times(rank), self.waited_s[rank]
        if waited_s > 0 and FIRST_STEP in times:
            times[FIRST_STEP] = max(0.0, times[FIRST_STEP] - waited_s)
            times[PEERS] = waited_s
        return times


class Job(NamedTuple):
    run_id: str
    attempts: dict[int, Analysis]
    notes: list[str]


def analyse_job(events: Iterable[Event], notes: Iterable[str] = (), attempts: Iterable[int] | None = None) -> Job:
    """Analyse all attempts of a job, or `attempts` only. Args: events: by node and time.

    Raises: UsageError if the events contain no attempt, or not a requested one.
    """
    all_ = list(events)
    by_attempt = split_attempts(all_)
    known = list_attempts(all_)
    if not known:
        raise UsageError("the events contain no start: no event has the number of an attempt")
    wanted = known if attempts is None else list(attempts)
    for each in wanted:
        if each not in known:
            raise UsageError(f"--attempt {each}: no such attempt; the attempts are {_numbers(known)}")
    run_id = max((event.run_id for event in all_), default="")
    notes = [*notes, *_missing(all_)]
    return Job(run_id, {each: analyse(make_start(by_attempt[each], each)) for each in wanted}, list(notes))


def _missing(events: Iterable[Event]) -> list[str]:
    """Return notes on events that the coordinator's file lacks; the nodes' own files may have them."""
    last: dict[str, Event] = {}
    for event in events:
        if event.name == EVENTS_DROPPED and isinstance(event.value, int | float) and event.value > 0:
            last[event.node] = event
    return [
        f"{counted(int(event.value or 0), 'event')} of {node} did not get into the run file"
        f" ({', '.join(sorted(event.attrs))})"
        for node, event in sorted(last.items())
    ][:MAX_NOTES]


def analyse(start: Start) -> Analysis:
    maker = Pieces()
    whole = {rank: maker.of_rank(rank) for rank in start.ranks}
    arrivals = Arrivals(start, whole)
    path = find_path(start, whole, maker, arrivals)
    pieces = {rank: arrivals.split(rank, own) for rank, own in whole.items()}
    waited_s = {
        rank: sum(piece.end_ns - piece.begin_ns for piece in own if piece.label == PEERS) / 1e9
        for rank, own in pieces.items()
    }
    stages = split_waits(
        measure(start), {(rank.node.name, rank.rank): seconds for rank, seconds in waited_s.items()}
    )
    ends_s = [end_of(rank) / 1e9 for rank in start.ranks if rank.first_step_ns is not None]
    has_all = bool(ends_s) and len(ends_s) == len(start.ranks)
    seen_s = max((span.end_ns or span.begin_ns for node in start.nodes for span in node.spans), default=0) / 1e9
    start_s = max(ends_s) if ends_s else max([seen_s, *(end_of(rank) / 1e9 for rank in start.ranks)])
    stragglers = find_stragglers(stages, start_s)
    last_s = max([seen_s, *(max(rank.last_ns, rank.exit_ns or 0) / 1e9 for rank in start.ranks)])
    return Analysis(
        start=start,
        pieces=pieces,
        waited_s=waited_s,
        stages=stages,
        path=path,
        stragglers=stragglers,
        lost=_lose(start, pieces, _excess_s(path, stages)),
        first_step_s=max(ends_s) if has_all else None,
        start_s=start_s,
        end_s=max(last_s, start_s),
    )


def _lose(start: Start, pieces: dict[RankStart, list[Piece]], excess_s: float) -> LostTime:
    by_label: dict[str, int] = {}
    total_ns = unseen_ns = ranks = 0
    for rank in start.ranks:
        if rank.first_step_ns is None:
            unseen_ns += end_of(rank)
            continue
        ranks += 1
        total_ns += end_of(rank)
        for label, begin_ns, end_ns in pieces[rank]:
            by_label[label] = by_label.get(label, 0) + end_ns - begin_ns
    return LostTime(
        total_s=total_ns / 1e9,
        by_label={label: time_ns / 1e9 for label, time_ns in by_label.items()},
        ranks=ranks,
        unseen_ranks=len(start.ranks) - ranks,
        unseen_s=unseen_ns / 1e9,
        straggler_s=excess_s,
        straggler_lost_s=excess_s * ranks,
    )


def _excess_s(path: Iterable[PathStep], stages: Iterable[StageMeasures]) -> float:
    """Return how much shorter the critical path would be if each of its stages had taken its median."""
    medians = {stage.stage: stage.median_s for stage in stages}
    own: dict[tuple[str, str, int | None], float] = {}
    for step in path:
        if step.label in medians and step.label not in _SAME_FOR_ALL:
            key = step.label, step.node, step.rank
            own[key] = own.get(key, 0.0) + (step.end_ns - step.begin_ns) / 1e9
    return sum(max(0.0, seconds - medians[label]) for (label, _, _), seconds in own.items())


def _numbers(numbers: list[int]) -> str:
    if len(numbers) > 3:
        return f"{numbers[0]} to {numbers[-1]}"
    return ", ".join(map(str, numbers))
