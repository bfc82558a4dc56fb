"""PURE: the time of a rank until its first step, cut into pieces, each of which belongs to one stage alone.

Stages overlap: during the rendezvous an image is opened and an environment restored. A moment of an accelerator
is lost once, so it counts for the stage that decided: the last to end, of those over when the ranks started.
Rendezvous counts where no other stage ran. Time without any span is waiting. The pieces of a rank have no gap from
zero to its end.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

from bootseer.report.intervals import union_ns
from bootseer.report.starts import FIRST_STEP, ORDER, OTHER, RENDEZVOUS, SPAWN, NodeStart, RankStart, Span, closed

WAITING = "waiting"  # between spans: nothing was observed
LATE = "late"  # the job had begun, but not this node
PEERS = "peers"  # in the script, until the last rank arrived: inferred
UNSEEN = "unseen"  # in the script of a rank without an observed first step
LABELS = (LATE, *ORDER, OTHER, PEERS, WAITING, UNSEEN)
_FOREVER_NS = 2**63


class Piece(NamedTuple):
    """A part of a rank's time."""

    label: str  # of LABELS
    begin_ns: int
    end_ns: int


def end_of(rank: RankStart) -> int:
    """Return the time of a rank's first step; without one, of its end or last event."""
    if rank.first_step_ns is not None:
        return max(0, rank.first_step_ns)
    return max(0, rank.last_ns if rank.exit_ns is None else rank.exit_ns)


class Pieces:
    """The pieces of all ranks; those that ranks of a node share are computed once."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[str, int], list[Piece]] = {}

    def of_rank(self, rank: RankStart) -> list[Piece]:
        """Return a rank's pieces from zero to its first step, or to its end."""
        end_ns = end_of(rank)
        spawn_ns = spawn_of(rank)
        found = list(self.of_node(rank.node, spawn_ns))
        if end_ns > spawn_ns:
            found += _in_rank(rank, spawn_ns, end_ns)
        return found

    def of_node(self, node: NodeStart, until_ns: int) -> list[Piece]:
        """Return the pieces that a node's ranks share, from zero until they are started."""
        known = self._nodes.get((node.name, until_ns))
        if known is None:
            known = self._nodes[node.name, until_ns] = _on_node(node, until_ns)
        return known


def spawn_of(rank: RankStart) -> int:
    """Return when a rank was spawned, as far as that is known; never after its end."""
    return min(end_of(rank), _begin_of(rank))


def _begin_of(rank: RankStart) -> int:
    times = [each for each in (rank.script_ns, rank.first_step_ns) if each is not None]
    times += [rank.spans[0].begin_ns] if rank.spans else []
    if rank.spawn_ns is not None and all(rank.spawn_ns <= each for each in times):
        return max(0, rank.spawn_ns)
    if rank.started_ns is not None:
        times.append(rank.started_ns)
    return max(0, min(times, default=0))


def _on_node(node: NodeStart, until_ns: int) -> list[Piece]:
    late_ns = min(max(0, node.zero_ns), until_ns)
    found = [Piece(LATE, 0, late_ns)] if late_ns else []
    return found + _cut(node.spans, late_ns, until_ns, WAITING)


def _in_rank(rank: RankStart, spawn_ns: int, end_ns: int) -> list[Piece]:
    script_ns = rank.script_ns
    if script_ns is None:
        seen = [span.begin_ns for span in rank.spans] or [rank.started_ns or spawn_ns]
        script_ns = min(seen)
    script_ns = min(max(script_ns, spawn_ns), end_ns)
    found = [Piece(SPAWN, spawn_ns, script_ns)] if script_ns > spawn_ns else []
    rest = UNSEEN if rank.first_step_ns is None else FIRST_STEP
    return found + _cut(rank.spans, script_ns, end_ns, rest)


def _cut(spans: Iterable[Span], low_ns: int, high_ns: int, rest: str) -> list[Piece]:
    """Cut [low, high) by stages; `rest` labels time without an open span."""
    own = [
        (each, _FOREVER_NS if each.end_ns is None else each.end_ns)
        for each in spans
        if each.begin_ns < high_ns and (each.end_ns is None or each.end_ns > low_ns)
    ]
    edges = {low_ns, high_ns}
    for each, end_ns in own:
        edges.add(max(each.begin_ns, low_ns))
        edges.add(min(end_ns, high_ns))
    ordered = sorted(edges)
    found: list[Piece] = []
    for begin_ns, end_ns in pairwise(ordered):
        active = [(each, until_ns) for each, until_ns in own if each.begin_ns <= begin_ns and until_ns >= end_ns]
        label = rest
        if active:
            label = max(active, key=lambda pair: _weight(pair[0], pair[1], high_ns))[0].stage
        if found and found[-1].label == label:
            found[-1] = Piece(label, found[-1].begin_ns, end_ns)
        else:
            found.append(Piece(label, begin_ns, end_ns))
    return found


def _weight(span: Span, end_ns: int, high_ns: int) -> tuple[bool, bool, int, int]:
    """Return the sort key of concurrent stages: the largest decided. Stages beyond `high_ns` delayed nothing."""
    return span.stage != RENDEZVOUS, end_ns <= high_ns, end_ns, ORDER.get(span.stage, len(ORDER))


# ---- how long stages took -------------------------------------------------------------------------------------


def node_times(node: NodeStart) -> dict[str, float]:
    """Return the agent's seconds by stage; spans that began after the first steps are no part of the start."""
    steps = [rank.first_step_ns for rank in node.ranks if rank.first_step_ns is not None]
    high_ns = max(steps) if steps and len(steps) == len(node.ranks) else _FOREVER_NS
    spans: dict[str, list[Span]] = {}
    for span in node.spans:
        if span.begin_ns < high_ns:
            spans.setdefault(span.stage, []).append(span)
    return {stage: union_ns(closed(own)) / 1e9 for stage, own in spans.items() if closed(own)}


def rank_times(rank: RankStart) -> dict[str, float]:
    """Return the rank's own seconds by stage, with the rest of its script until the first step."""
    high_ns = rank.first_step_ns
    spans: dict[str, list[tuple[int, int]]] = {}
    for span, end_ns in rank.finished():
        spans.setdefault(span.stage, []).append((span.begin_ns, end_ns))
    times = {stage: union_ns(own, None, high_ns) / 1e9 for stage, own in spans.items()}
    spawn_ns, script_ns = rank.spawn_ns, rank.script_ns
    if script_ns is None:
        return times
    if spawn_ns is not None and spawn_ns <= script_ns:
        times[SPAWN] = (script_ns - spawn_ns) / 1e9
    if high_ns is not None and high_ns >= script_ns:
        everything = [each for own in spans.values() for each in own]
        times[FIRST_STEP] = (high_ns - script_ns - union_ns(everything, script_ns, high_ns)) / 1e9
    return times


def both_times(stage: str, rank: RankStart, own: dict[str, float]) -> float | None:
    """Return the time of a stage in which both a rank and its node take part, such as imports."""
    if stage in (SPAWN, FIRST_STEP):
        return own.get(stage)
    high_ns = rank.first_step_ns
    spans = [
        each for each in rank.node.spans if each.stage == stage and (high_ns is None or each.begin_ns < high_ns)
    ]
    if not spans:
        return own.get(stage)
    mine = [(span.begin_ns, end_ns) for span, end_ns in rank.finished() if span.stage == stage]
    theirs = closed(spans)
    return union_ns([*mine, *theirs], None, high_ns) / 1e9 if mine or theirs else None
