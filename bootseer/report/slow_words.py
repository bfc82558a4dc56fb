"""PURE: the slow parts of a start, described in up to three lines."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import NamedTuple

from bootseer.report.analysis import Analysis
from bootseer.report.pieces import LATE, PEERS, end_of
from bootseer.report.starts import FIRST_STEP, RankStart, Span, Start
from bootseer.report.stragglers import Straggler

MAX_LINES = 3
STOPPED = (None, 0, -signal.SIGTERM)  # statuses of ranks that did not fail by themselves
MAX_NAMES = 3


class OpenSpan(NamedTuple):
    """A span that never closed, after a crash or in a start that still runs."""

    span: Span
    node: str
    rank: int | None


def slow_lines(found: Analysis) -> list[str]:
    """Describe the ranks that did not reach the first step and the stragglers, or report that there are none."""
    lines = _stopped_lines(found.start)
    shown = found.stragglers[: MAX_LINES - len(lines)]
    lines += [straggler_line(each, found) for each in shown]
    if len(found.stragglers) > len(shown):
        lines.append(f"and {len(found.stragglers) - len(shown):,} more")
    if not found.stragglers:
        lines.append(_no_straggler_line(found))
    return lines


def straggler_line(slow: Straggler, found: Analysis) -> str:
    """Return a line such as "env on node17: 43.0 s, 6.1 times the median of 7.0 s; all 8 ranks of node17"."""
    sizes = {node.name: len(node.ranks) for node in found.start.nodes}
    names = [node for node, _ in slow.places]
    where = names[0] if len(names) == 1 else f"{len(names):,} nodes ({join_some(names)})"
    if slow.stage == LATE:
        began = "began" if len(names) == 1 else "began up to"
        return f"{where} {began} {seconds(slow.seconds)} after the job's first event; the others had to wait"
    up_to = "" if len(names) == 1 and slow.is_whole else "up to "
    ratio = slow.ratio
    times = f", {ratio:.1f} times the median of {seconds(slow.median_s)}" if ratio is not None else ""
    if slow.is_whole:
        ranks = sum(sizes[name] for name in names)
        all_ = {0: "no ranks", 1: "the one rank", 2: "both ranks"}.get(ranks, f"all {ranks:,} ranks")
        what = f"{all_} of {names[0] if len(names) == 1 else 'these nodes'}"
        return f"{slow.stage} on {where}: {up_to}{seconds(slow.seconds)}{times}; {what}"
    numbers = [rank for _, ranks in slow.places for rank in ranks]
    if len(numbers) == 1:
        rest = sizes[names[0]] - 1
        others = (
            "" if not rest else "; not the other one there" if rest == 1 else f"; not the other {rest:,} there"
        )
        return f"{slow.stage} of rank {numbers[0]} on {where}: {seconds(slow.seconds)}{times}{others}"
    text = f"{len(numbers):,} ranks ({join_some([str(each) for each in sorted(numbers)])})"
    return f"{slow.stage} of {text} on {where}: up to {seconds(slow.seconds)}{times}"


def find_unfinished(start: Start) -> list[OpenSpan]:
    """Return the open spans, the longest first."""
    found = [OpenSpan(span, node.name, None) for node in start.nodes for span in node.spans if span.end_ns is None]
    found += [
        OpenSpan(span, rank.node.name, rank.rank)
        for rank in start.ranks
        for span in rank.spans
        if span.end_ns is None
    ]
    return sorted(found, key=lambda each: (each.span.begin_ns, each.node, each.rank or 0))


def has_failed(rank: RankStart) -> bool:
    """Return whether a rank failed before its first step or never left a stage; False if it was only stopped."""
    if rank.first_step_ns is not None:
        return False
    return _open_of(rank) is not None or rank.status not in STOPPED


def _stopped_lines(start: Start) -> list[str]:
    """Describe the ranks that never made a step though others did, or that ended before it."""
    stopped = [rank for rank in start.ranks if rank.first_step_ns is None and (_open_of(rank) or rank.status)]
    if not stopped:
        return []
    failed = [rank for rank in stopped if rank.exit_ns is not None and rank.status not in STOPPED]
    first = min(failed or stopped, key=lambda rank: (end_of(rank), rank.rank))
    others = f" ({len(stopped) - 1:,} more did not reach the first step)" if len(stopped) > 1 else ""
    span = _open_of(first)
    who = f"rank {first.rank} on {first.node.name}"
    if span is not None:
        took = seconds(max(0, end_of(first) - span.begin_ns) / 1e9)
        end = "still in it" if first.exit_ns is None else f"it ended with status {first.status}"
        what = span.stage if span.name == span.stage else f"{span.stage} ({span.name})"
        return [f"{who} did not leave {what}: {took} after it began {end}{others}"]
    after = seconds(end_of(first) / 1e9)
    return [f"{who} ended with status {first.status} after {after}, before its first step{others}"]


def _open_of(rank: RankStart) -> Span | None:
    return next((span for span in rank.spans if span.end_ns is None), None)


def _no_straggler_line(found: Analysis) -> str:
    totals: dict[str, int] = {}
    for step in found.path:
        totals[step.label] = totals.get(step.label, 0) + step.end_ns - step.begin_ns
    measured = {stage.stage: stage for stage in found.stages}
    known = [label for label in totals if label in measured] or [label for label in measured if label != PEERS]
    if not known:
        return "no stage was observed"
    longest = max(known, key=lambda label: (totals.get(label, 0), measured[label].median_s))
    stage = measured[longest]
    places = "ranks" if stage.is_of_ranks else "nodes"
    count = len(stage.all)
    what = "everything else up to the first step" if longest == FIRST_STEP else longest
    if count == 1:
        one = stage.longest
        where = one.node if one.rank is None else f"rank {one.rank} on {one.node}"
        return f"{what} took longest: {seconds(one.seconds)} on {where}, the only place where it was observed"
    return (
        f"nothing stands out; {what} took longest: median {seconds(stage.median_s)},"
        f" maximum {seconds(stage.longest.seconds)}, on {count:,} {places}"
    )


def join_some(names: Sequence[str]) -> str:
    """Join the first names, and count the others."""
    if len(names) <= MAX_NAMES + 1:
        return ", ".join(names)
    return f"{', '.join(names[:MAX_NAMES])} and {len(names) - MAX_NAMES:,} more"


def seconds(value: float) -> str:
    """Format a duration: 3.2 ms, 0.42 s, 43.0 s, 614 s."""
    if abs(value) < 0.0995:
        return f"{value * 1000:.2g} ms" if value else "0 s"
    if abs(value) < 0.995:
        return f"{value:.2f} s"
    return f"{value:.1f} s" if abs(value) < 1000 else f"{value:,.0f} s"
