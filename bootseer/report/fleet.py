"""PURE: many jobs -> the share of accelerator time that starts took, by size and stage; slow nodes.

Version `bootseer-fleet/1`, described in docs/guide/report.md. Counted are ranks with an observed first step, and
ranks of the same job that failed before it. The time of other ranks is shown apart, as their activity is unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bootseer.counted import counted
from bootseer.report.agent_reports import Record
from bootseer.report.analysis import Analysis, Job
from bootseer.report.pieces import LABELS, end_of
from bootseer.report.slow_words import seconds
from bootseer.report.starts import RankStart
from bootseer.report.text import align, hours

FORMAT = "bootseer-fleet/1"
SIZES = (1, 8, 64, 512, 4096)  # number of ranks at which each class of sizes begins
MAX_NODES = 100
MAX_SHOWN = 12


class JobRow(Record):
    run_id: str
    source: str
    first_event_unix_s: float
    ranks: int
    nodes: int
    attempts: int
    first_step_s: float | None  # of the first attempt
    lost_s: float  # accelerator-seconds of all attempts
    total_s: float
    share: float | None
    unknown_s: float  # of ranks without an observed first step


class SizeRow(Record):
    ranks_from: int
    ranks_to: int | None
    jobs: int
    lost_s: float
    total_s: float
    share: float | None
    median_first_step_s: float | None


class StageShare(Record):
    stage: str
    lost_s: float
    share_of_lost: float


class SlowNode(Record):
    node: str
    jobs: int  # in which it took part
    slow_jobs: int  # in which it was an outlier
    excess_s: float  # sum over these jobs of the time above medians
    stages: list[str]  # the worst first


class Fleet(Record):
    format: str
    jobs: int
    lost_s: float
    total_s: float
    share: float | None
    unknown_s: float
    sizes: list[SizeRow]
    stages: list[StageShare]
    nodes: list[SlowNode]
    job_rows: list[JobRow]
    notes: list[str]


class _NodeTotals:
    __slots__ = ("excess_s", "jobs", "slow_jobs", "stages")

    def __init__(self) -> None:
        self.jobs = self.slow_jobs = 0
        self.excess_s = 0.0
        self.stages: dict[str, float] = {}


class _Totals(NamedTuple):
    lost_s: float
    total_s: float
    unknown_s: float
    by_label: dict[str, float]


class FleetMaker:
    """Collects one row for each job."""

    def __init__(self) -> None:
        self._rows: list[JobRow] = []
        self._by_label: dict[str, float] = {}
        self._nodes: dict[str, _NodeTotals] = {}

    def add(self, job: Job, source: str) -> JobRow:
        """Add one job. Args: source: the path of its events."""
        sums = [_sum(found) for found in self._all(job)]
        first = min(job.attempts)
        analyses = list(job.attempts.values())
        lost_s, total_s = sum(each.lost_s for each in sums), sum(each.total_s for each in sums)
        row = JobRow(
            run_id=job.run_id,
            source=source,
            first_event_unix_s=min(each.start.wall_ns for each in analyses) / 1e9,
            ranks=max(len(each.start.ranks) for each in analyses),
            nodes=max(len(each.start.nodes) for each in analyses),
            attempts=len(analyses),
            first_step_s=job.attempts[first].first_step_s,
            lost_s=lost_s,
            total_s=total_s,
            share=lost_s / total_s if total_s > 0 else None,
            unknown_s=sum(each.unknown_s for each in sums),
        )
        for each in sums:
            for label, value in each.by_label.items():
                self._by_label[label] = self._by_label.get(label, 0.0) + value
        self._add_nodes(analyses)
        self._rows.append(row)
        return row

    def finish(self, notes: Iterable[str] = ()) -> Fleet:
        """Return the summary of all jobs."""
        rows = sorted(self._rows, key=lambda row: (-row.lost_s, row.first_event_unix_s, row.source))
        lost_s, total_s = sum(row.lost_s for row in rows), sum(row.total_s for row in rows)
        nodes = [
            SlowNode(
                node=name,
                jobs=seen.jobs,
                slow_jobs=seen.slow_jobs,
                excess_s=seen.excess_s,
                stages=sorted(seen.stages, key=lambda stage: (-seen.stages[stage], stage)),
            )
            for name, seen in self._nodes.items()
            if seen.slow_jobs
        ]
        nodes.sort(key=lambda node: (-node.excess_s, -node.slow_jobs, node.node))
        return Fleet(
            format=FORMAT,
            jobs=len(rows),
            lost_s=lost_s,
            total_s=total_s,
            share=lost_s / total_s if total_s > 0 else None,
            unknown_s=sum(row.unknown_s for row in rows),
            sizes=_by_size(rows),
            stages=[
                StageShare(
                    stage=label,
                    lost_s=self._by_label[label],
                    share_of_lost=self._by_label[label] / lost_s if lost_s > 0 else 0.0,
                )
                for label in LABELS
                if label in self._by_label
            ],
            nodes=nodes[:MAX_NODES],
            job_rows=rows,
            notes=list(notes),
        )

    @staticmethod
    def _all(job: Job) -> list[Analysis]:
        return [job.attempts[number] for number in sorted(job.attempts)]

    def _add_nodes(self, analyses: Iterable[Analysis]) -> None:
        present: set[str] = set()
        excess: dict[str, dict[str, float]] = {}
        for found in analyses:
            present.update(node.name for node in found.start.nodes)
            longest: dict[tuple[str, str], float] = {}
            for measures in found.stages:
                for each in measures.all:
                    key = measures.stage, each.node
                    longest[key] = max(each.seconds, longest.get(key, 0.0))
            for slow in found.stragglers:
                for node, _ in slow.places:
                    value = max(0.0, longest.get((slow.stage, node), 0.0) - slow.median_s)
                    own = excess.setdefault(node, {})
                    own[slow.stage] = own.get(slow.stage, 0.0) + value
        for name in present:
            seen = self._nodes.setdefault(name, _NodeTotals())
            seen.jobs += 1
            for stage, value in excess.get(name, {}).items():
                seen.stages[stage] = seen.stages.get(stage, 0.0) + value
                seen.excess_s += value
            seen.slow_jobs += name in excess


def is_counted(rank: RankStart, found: Analysis) -> bool:
    """Return whether a rank's time to its first step, or to its failure before that, surely was a start."""
    if rank.first_step_ns is not None:
        return True
    return (
        bool(rank.status)
        and not rank.unseen
        and (found.lost.ranks > 0 or any(s.end_ns is None for s in rank.spans))
    )


def fleet_text(fleet: Fleet) -> str:
    lines = [f"{counted(fleet.jobs, 'job')}: {_share(fleet.share)} of their accelerators' time spent on starts"]
    lines.append(f"lost {hours(fleet.lost_s)} of {hours(fleet.total_s)}")
    if fleet.unknown_s:
        lines.append(f"not counted: {hours(fleet.unknown_s)} of ranks without an observed first step")
    rows = [("ranks", "jobs", "share lost", "lost", "of", "median first step")]
    for size in fleet.sizes:
        step = "-" if size.median_first_step_s is None else seconds(size.median_first_step_s)
        name = (
            f"{size.ranks_from:,} and more"
            if size.ranks_to is None
            else f"{size.ranks_from:,} to {size.ranks_to:,}"
        )
        rows.append((name, f"{size.jobs:,}", _share(size.share), hours(size.lost_s), hours(size.total_s), step))
    lines += ["", "By size", *_indent(align(rows))]
    if fleet.stages:
        rows_ = [(each.stage, hours(each.lost_s), f"{each.share_of_lost:.1%}") for each in fleet.stages]
        lines += ["", "By stage", *_indent(align([("stage", "lost", "share of it"), *rows_]))]
    if fleet.nodes:
        slow = [("node", "slow in", "jobs", "above medians", "stages")]
        slow += [
            (
                each.node,
                f"{each.slow_jobs:,}",
                f"{each.jobs:,}",
                seconds(each.excess_s),
                ", ".join(each.stages[:4]),
            )
            for each in fleet.nodes[:MAX_SHOWN]
        ]
        lines += ["", "Slowest nodes", *_indent(align(slow, (0, 4)))]
    table = [("job", "ranks", "attempts", "first step", "lost", "share")]
    table += [
        (
            row.run_id or row.source,
            f"{row.ranks:,}",
            f"{row.attempts:,}",
            "-" if row.first_step_s is None else seconds(row.first_step_s),
            hours(row.lost_s),
            _share(row.share),
        )
        for row in fleet.job_rows[:MAX_SHOWN]
    ]
    lines += ["", "Jobs with the largest loss", *_indent(align(table))]
    if len(fleet.job_rows) > MAX_SHOWN:
        lines.append(f"  and {len(fleet.job_rows) - MAX_SHOWN:,} more with --json")
    if fleet.notes:
        lines += ["", "Left out", *_indent(fleet.notes[:MAX_SHOWN])]
    return "\n".join(lines)


def _sum(found: Analysis) -> _Totals:
    lost_ns = total_ns = unknown_ns = 0
    by_label: dict[str, int] = {}
    for rank in found.start.ranks:
        end_ns = max(rank.last_ns, rank.exit_ns or 0, end_of(rank))
        if not is_counted(rank, found):
            unknown_ns += end_ns
            continue
        lost_ns += end_of(rank)
        total_ns += end_ns
        for label, begin_ns, until_ns in found.pieces[rank]:
            by_label[label] = by_label.get(label, 0) + until_ns - begin_ns
    labels = {label: value / 1e9 for label, value in by_label.items()}
    return _Totals(lost_ns / 1e9, total_ns / 1e9, unknown_ns / 1e9, labels)


def _by_size(rows: Iterable[JobRow]) -> list[SizeRow]:
    found = []
    all_ = list(rows)
    for place, low in enumerate(SIZES):
        high = SIZES[place + 1] - 1 if place + 1 < len(SIZES) else None
        own = [row for row in all_ if row.ranks >= low and (high is None or row.ranks <= high)]
        if not own:
            continue
        lost_s, total_s = sum(row.lost_s for row in own), sum(row.total_s for row in own)
        steps = sorted(row.first_step_s for row in own if row.first_step_s is not None)
        found.append(
            SizeRow(
                ranks_from=low,
                ranks_to=high,
                jobs=len(own),
                lost_s=lost_s,
                total_s=total_s,
                share=lost_s / total_s if total_s > 0 else None,
                median_first_step_s=steps[(len(steps) - 1) // 2] if steps else None,
            )
        )
    return found


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _indent(lines: Iterable[str]) -> list[str]:
    return ["  " + line for line in lines]
