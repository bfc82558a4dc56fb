"""PURE: a start -> the observed time of each stage on every node or rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bootseer.report.intervals import median_low
from bootseer.report.pieces import LABELS, LATE, PEERS, both_times, node_times, rank_times
from bootseer.report.starts import FIRST_STEP, Start

MIN_NS = 10_000_000  # nodes that begin within this are not late


class Measure(NamedTuple):
    """The time of one stage in one place."""

    seconds: float
    node: str
    rank: int | None  # None: the whole node


class StageMeasures(NamedTuple):
    """The times of one stage in all places."""

    stage: str
    is_of_ranks: bool
    all: list[Measure]
    median_s: float
    longest: Measure


def measure(start: Start) -> list[StageMeasures]:
    """Return all observed stages in order; a stage in which ranks take part is measured for each rank."""
    of_nodes: dict[str, list[Measure]] = {}
    of_ranks: dict[str, list[Measure]] = {}
    for node in start.nodes:
        for stage, seconds in node_times(node).items():
            of_nodes.setdefault(stage, []).append(Measure(seconds, node.name, None))
    own = [(rank, rank_times(rank)) for rank in start.ranks]
    for stage in {stage for _, times in own for stage in times}:
        is_shared = stage in of_nodes
        for rank, times in own:
            took_s = both_times(stage, rank, times) if is_shared else times.get(stage)
            if took_s is not None:
                of_ranks.setdefault(stage, []).append(Measure(took_s, rank.node.name, rank.rank))
    if start.is_clocked and max((node.zero_ns for node in start.nodes), default=0) > max(MIN_NS, start.error_ns):
        of_nodes[LATE] = [Measure(node.zero_ns / 1e9, node.name, None) for node in start.nodes]
    found = [_gather(stage, True, all_) for stage, all_ in of_ranks.items()]
    found += [_gather(stage, False, all_) for stage, all_ in of_nodes.items() if stage not in of_ranks]
    return sorted(found, key=lambda each: LABELS.index(each.stage))


def split_waits(stages: Iterable[StageMeasures], waited_s: Mapping[tuple[str, int], float]) -> list[StageMeasures]:
    """Return the stages, with the time that ranks waited for the last one as a separate stage."""
    found: list[StageMeasures] = []
    for stage in stages:
        if stage.stage != FIRST_STEP or not any(waited_s.values()):
            found.append(stage)
            continue
        waits = [each._replace(seconds=waited_s.get((each.node, each.rank or 0), 0.0)) for each in stage.all]
        own = [
            each._replace(seconds=max(0.0, each.seconds - wait.seconds))
            for each, wait in zip(stage.all, waits, strict=True)
        ]
        found += [_gather(FIRST_STEP, True, own), _gather(PEERS, True, waits)]
    return found


def _gather(stage: str, is_of_ranks: bool, all_: Iterable[Measure]) -> StageMeasures:
    ordered = sorted(all_, key=lambda each: (-each.seconds, each.node, each.rank or 0))
    return StageMeasures(stage, is_of_ranks, ordered, median_low(each.seconds for each in ordered), ordered[0])
