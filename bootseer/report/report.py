"""PURE: an analysis as a record: the output of `bootseer report --json`, described in docs/guide/report.md.

Version `bootseer-report/1`. Seconds count from the job's first event of the attempt. Values that were not observed
are null or missing from a list, and `notes` lists them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from bootseer.counted import counted
from bootseer.report.agent_reports import (
    CheckRow,
    FactRow,
    FallbackRow,
    HangRow,
    Record,
    RuleRow,
    WayRow,
    find_broken_rules,
    find_checks,
    find_fallbacks,
    find_hangs,
    gather,
    is_broken_rule,
    is_check,
    is_fallback,
    is_hang,
)
from bootseer.report.analysis import Analysis, Job
from bootseer.report.measures import StageMeasures
from bootseer.report.pieces import LABELS, node_times
from bootseer.report.slow_words import STOPPED, find_unfinished, slow_lines
from bootseer.report.starts import Span, Start

FORMAT = "bootseer-report/1"
MAX_SLOWEST = 5
MAX_ENDED = 20  # ranks of an attempt
MAX_ROWS = 1000  # of spans that are open or failed


class EndedRank(Record):
    """A rank that failed by itself."""

    node: str
    rank: int
    status: int  # exit status, or minus the signal
    after_s: float


class AttemptRow(Record):
    attempt: int
    ranks: int
    nodes: int
    first_step_s: float | None
    first_steps: int
    lost_s: float
    end_s: float
    failed: list[EndedRank]  # the first ones, by time


class Place(Record):
    node: str
    rank: int | None
    seconds: float


class StageRow(Record):
    stage: str
    places: str  # "nodes" or "ranks"
    observed: int
    of: int
    median_s: float
    max_s: float
    max_over_median: float | None
    behind_s: float  # sum over places of the wait for the slowest, had all begun at once
    lost_s: float | None  # accelerator-seconds; None if no first step was observed
    slowest: list[Place]


class PathRow(Record):
    stage: str
    node: str
    rank: int | None
    begin_s: float
    end_s: float


class LostRow(Record):
    total_s: float
    ranks: int
    by_stage: dict[str, float]
    straggler_s: float
    straggler_lost_s: float
    straggler_share: float | None
    ranks_without_first_step: int
    without_first_step_s: float


class SlowRow(Record):
    stage: str
    seconds: float
    median_s: float
    times_median: float | None
    places: list[tuple[str, list[int]]]
    whole_nodes: bool


class SpanRow(Record):
    stage: str
    name: str
    node: str
    rank: int | None
    begin_s: float
    end_s: float | None
    error: str | None


class NodeRow(Record):
    node: str
    begin_s: float
    ranks: int
    last_first_step_s: float | None
    stages: dict[str, float]


class RankRow(Record):
    rank: int
    node: str
    first_step_s: float | None
    started: str
    status: int | None
    stages: dict[str, float]


class Clock(Record):
    kind: str  # "one node", "job": all on the coordinator's clock, "nodes": each begins at its own first event
    error_s: float


class Report(Record):
    format: str
    run_id: str
    attempt: int
    attempts: list[AttemptRow]
    first_event_unix_s: float
    nodes: int
    ranks: int
    first_step_s: float | None
    first_steps: int
    start_s: float
    clock: Clock
    slow: list[str]
    stragglers: list[SlowRow]
    stages: list[StageRow]
    path: list[PathRow]
    lost: LostRow
    open: list[SpanRow]
    failed: list[SpanRow]
    fallbacks: list[FallbackRow]
    rules: list[RuleRow]
    checks: list[CheckRow]
    facts: list[FactRow]
    ways: list[WayRow]
    notes: list[str]
    node_rows: list[NodeRow]
    rank_rows: list[RankRow]
    hangs: list[HangRow] = msgspec.field(default_factory=list)  # of all attempts


def make_report(job: Job, attempt: int) -> Report:
    found = job.attempts[attempt]
    start = found.start
    facts, ways = gather(start)
    share = found.lost.straggler_s / found.start_s if found.start_s > 0 and found.lost.ranks else None
    return Report(
        format=FORMAT,
        run_id=job.run_id,
        attempt=attempt,
        attempts=[_attempt_row(number, each) for number, each in sorted(job.attempts.items())],
        first_event_unix_s=start.wall_ns / 1e9,
        nodes=len(start.nodes),
        ranks=len(start.ranks),
        first_step_s=found.first_step_s,
        first_steps=found.lost.ranks,
        start_s=found.start_s,
        clock=_clock(start),
        slow=slow_lines(found),
        stragglers=[
            SlowRow(
                stage=each.stage,
                seconds=each.seconds,
                median_s=each.median_s,
                times_median=each.ratio,
                places=[(node, list(ranks)) for node, ranks in each.places],
                whole_nodes=each.is_whole,
            )
            for each in found.stragglers
        ],
        stages=stage_rows(found),
        path=[
            PathRow(
                stage=each.label,
                node=each.node,
                rank=each.rank,
                begin_s=each.begin_ns / 1e9,
                end_s=each.end_ns / 1e9,
            )
            for each in found.path
        ],
        lost=LostRow(
            total_s=found.lost.total_s,
            ranks=found.lost.ranks,
            by_stage={label: found.lost.by_label[label] for label in LABELS if label in found.lost.by_label},
            straggler_s=found.lost.straggler_s,
            straggler_lost_s=found.lost.straggler_lost_s,
            straggler_share=share,
            ranks_without_first_step=found.lost.unseen_ranks,
            without_first_step_s=found.lost.unseen_s,
        ),
        open=[_span_row(*each) for each in find_unfinished(start)][:MAX_ROWS],
        failed=_failed(start)[:MAX_ROWS],
        fallbacks=find_fallbacks(start, found.stages),
        hangs=[hang for _, each in sorted(job.attempts.items()) for hang in find_hangs(each.start)],
        rules=find_broken_rules(start),
        checks=find_checks(start),
        facts=facts,
        ways=ways,
        notes=[*make_notes(found), *job.notes],
        node_rows=[
            NodeRow(
                node=node.name,
                begin_s=node.zero_ns / 1e9,
                ranks=len(node.ranks),
                last_first_step_s=_last_step_s(rank.first_step_ns for rank in node.ranks),
                stages=node_times(node),
            )
            for node in start.nodes
        ],
        rank_rows=[
            RankRow(
                rank=rank.rank,
                node=rank.node.name,
                first_step_s=None if rank.first_step_ns is None else rank.first_step_ns / 1e9,
                started=rank.how,
                status=rank.status,
                stages=found.times_of(rank),
            )
            for rank in start.ranks
        ],
    )


def stage_rows(found: Analysis) -> list[StageRow]:
    """Return the stage table. Stages that only the accounting has (waiting) were not measured and have no row."""
    return [_stage_row(stage, found) for stage in found.stages]


def make_notes(found: Analysis) -> list[str]:
    """Return notes on missing observations and their effect on the figures."""
    start = found.start
    notes: list[str] = []
    if not start.is_clocked:
        lost = [node.name for node in start.nodes if not node.is_clocked]
        notes.append(
            f"{_some(lost)}: not on the coordinator's clock, so each such node begins at its own first event;"
            " its delay, and which node waited for which, are unknown"
        )
    if start.older:
        notes.append(f"{counted(start.older, 'older start')} in the same files: left out")
    if start.world_size > len(start.ranks):
        notes.append(
            f"these are {len(start.ranks):,} of the {start.world_size:,} ranks of the job:"
            " the event files of other nodes are missing"
        )
    if found.lost.unseen_ranks:
        text = f"first step observed on {found.lost.ranks:,} of {len(start.ranks):,} ranks"
        reasons = sorted({rank.unseen for rank in start.ranks if rank.unseen})
        notes.append(text + (f": {'; '.join(reasons[:3])}" if reasons else ""))
    unhooked = sum(rank.script_ns is None for rank in start.ranks)
    if unhooked:
        notes.append(f"{unhooked:,} of {len(start.ranks):,} ranks wrote no event from their script")
    silent = [node.name for node in start.nodes if not node.has_agent]
    if silent:
        notes.append(f"no events of the agent: {_some(silent)}")
    seen: dict[str, int] = {}
    for event in start.instants:
        if is_fallback(event) or is_hang(event) or is_broken_rule(event) or is_check(event):
            continue
        line = f"{event.name}: {event.error}"
        if line in seen or len(seen) < MAX_SLOWEST:
            seen[line] = seen.get(line, 0) + 1
    notes += [line if count == 1 else f"{line} ({count:,} times)" for line, count in seen.items()]
    return notes


def encode(record: msgspec.Struct) -> bytes:
    return msgspec.json.encode(record)


def _stage_row(stage: StageMeasures, found: Analysis) -> StageRow:
    longest_s = stage.longest.seconds
    return StageRow(
        stage=stage.stage,
        places="ranks" if stage.is_of_ranks else "nodes",
        observed=len(stage.all),
        of=len(found.start.ranks) if stage.is_of_ranks else len(found.start.nodes),
        median_s=stage.median_s,
        max_s=longest_s,
        max_over_median=longest_s / stage.median_s if stage.median_s > 0 else None,
        behind_s=sum(longest_s - each.seconds for each in stage.all),
        lost_s=found.lost.by_label.get(stage.stage, 0.0) if found.lost.ranks else None,
        slowest=[Place(node=each.node, rank=each.rank, seconds=each.seconds) for each in stage.all[:MAX_SLOWEST]],
    )


def _attempt_row(number: int, found: Analysis) -> AttemptRow:
    return AttemptRow(
        attempt=number,
        ranks=len(found.start.ranks),
        nodes=len(found.start.nodes),
        first_step_s=found.first_step_s,
        first_steps=found.lost.ranks,
        lost_s=found.lost.total_s + found.lost.unseen_s,
        end_s=found.end_s,
        failed=_ended(found.start),
    )


def _ended(start: Start) -> list[EndedRank]:
    found = [
        EndedRank(node=rank.node.name, rank=rank.rank, status=rank.status, after_s=rank.exit_ns / 1e9)
        for rank in start.ranks
        if rank.exit_ns is not None and rank.status is not None and rank.status not in STOPPED
    ]
    return sorted(found, key=lambda each: (each.after_s, each.rank))[:MAX_ENDED]


def _failed(start: Start) -> list[SpanRow]:
    places: list[tuple[str, int | None, Sequence[Span]]] = [(each.name, None, each.spans) for each in start.nodes]
    places += [(rank.node.name, rank.rank, rank.spans) for rank in start.ranks]
    return [
        _span_row(span, node, rank) for node, rank, spans in places for span in spans if span.error is not None
    ]


def _span_row(span: Span, node: str, rank: int | None) -> SpanRow:
    return SpanRow(
        stage=span.stage,
        name=span.name,
        node=node,
        rank=rank,
        begin_s=span.begin_ns / 1e9,
        end_s=None if span.end_ns is None else span.end_ns / 1e9,
        error=span.error,
    )


def _clock(start: Start) -> Clock:
    if len(start.nodes) == 1:
        return Clock(kind="one node", error_s=0.0)
    return Clock(kind="job" if start.is_clocked else "nodes", error_s=start.error_ns / 1e9)


def _last_step_s(times_ns: Iterable[int | None]) -> float | None:
    known = list(times_ns)
    times = [each for each in known if each is not None]
    return max(times) / 1e9 if times and len(times) == len(known) else None


def _some(names: list[str]) -> str:
    if len(names) <= MAX_SLOWEST:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3:,} more"
