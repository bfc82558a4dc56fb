"""PURE: the critical path: the chain of stages, by node and rank, that decided the first step of the last rank.

It is followed backwards from that step. Where ranks waited for the last one (then all continued at once) it leads
to that rank. Where a node waited, it leads to the node that was late or whose stage ended last. It crosses nodes
only by the job's clock. Its steps cover the time from zero to the first step without a gap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from bootseer.report.pieces import PEERS, WAITING, Piece, Pieces, end_of, spawn_of
from bootseer.report.starts import FIRST_STEP, OTHER, RENDEZVOUS, SPAWN, NodeStart, RankStart, Start

MIN_NS = 10_000_000  # shorter waits are not followed to other nodes
AT_ONCE_NS, AT_ONCE_SHARE, NEARLY_ALL = 50_000_000, 0.25, 0.9
MAX_STEPS = 1000


class PathStep(NamedTuple):
    """A part of the critical path; `rank` is None for the whole node."""

    label: str
    node: str
    rank: int | None
    begin_ns: int
    end_ns: int


class _Phase:
    """All ranks after the same stage, in their script: when each arrived there and when it continued."""

    __slots__ = ("_first_ns", "_lefts_ns", "is_together", "last", "last_ns")

    def __init__(self) -> None:
        self.last: RankStart | None = None
        self.last_ns = -1
        self._first_ns = 2**63
        self._lefts_ns: list[int] = []
        self.is_together = False

    def add(self, rank: RankStart, arrived_ns: int, left_ns: int) -> None:
        if arrived_ns > self.last_ns:
            self.last, self.last_ns = rank, arrived_ns
        self._first_ns = min(self._first_ns, arrived_ns)
        self._lefts_ns.append(left_ns)

    def finish(self) -> None:
        """Decide whether they waited: none continued before the last one came, then nearly all did at once."""
        lefts_ns = sorted(self._lefts_ns)
        max_ns = lefts_ns[math.ceil(len(lefts_ns) * NEARLY_ALL) - 1]
        at_once_ns = max(AT_ONCE_NS, (self.last_ns - self._first_ns) * AT_ONCE_SHARE)
        self.is_together = self.last_ns <= lefts_ns[0] and max_ns - lefts_ns[0] <= at_once_ns


class Arrivals:
    """The places where ranks waited for the last of them. Args: pieces: of each rank."""

    def __init__(self, start: Start, pieces: Mapping[RankStart, Sequence[Piece]]) -> None:
        self._is_clocked = start.is_clocked
        self._phases: dict[tuple[str, str], _Phase] = {}
        for rank in start.ranks:
            if rank.first_step_ns is None:
                continue
            last = {stage: (arrived_ns, left_ns) for stage, arrived_ns, left_ns in _unspanned(pieces[rank])}
            for stage, (arrived_ns, left_ns) in last.items():
                phase = self._phases.setdefault(self._key(rank, stage), _Phase())
                phase.add(rank, arrived_ns, left_ns)
        for phase in self._phases.values():
            phase.finish()

    def last_to_arrive(
        self, rank: RankStart, stage: str, arrived_ns: int, left_ns: int
    ) -> tuple[RankStart, int] | None:
        """Return the rank that this one, there from `arrived_ns`, waited for after `stage`, and its arrival."""
        phase = self._phases.get(self._key(rank, stage))
        if phase is None or phase.last is None or phase.last is rank or not phase.is_together:
            return None
        if arrived_ns + MIN_NS < phase.last_ns < left_ns:
            return phase.last, phase.last_ns
        return None

    def split(self, rank: RankStart, pieces: Sequence[Piece]) -> list[Piece]:
        """Return the pieces with the wait for the last rank as separate pieces."""
        found: list[Piece] = []
        stage = ""
        for piece in pieces:
            if piece.label == FIRST_STEP:
                other = self.last_to_arrive(rank, stage, piece.begin_ns, piece.end_ns)
                if other is not None:
                    found.append(Piece(PEERS, piece.begin_ns, other[1]))
                    piece = Piece(FIRST_STEP, other[1], piece.end_ns)  # noqa: PLW2901
            found.append(piece)
            stage = piece.label
        return found

    def _key(self, rank: RankStart, stage: str) -> tuple[str, str]:
        return "" if self._is_clocked else rank.node.name, stage


def find_path(
    start: Start, pieces: Mapping[RankStart, Sequence[Piece]], nodes: Pieces, arrivals: Arrivals
) -> list[PathStep]:
    """Return the critical path in the order of time; empty if no first step was observed."""
    stepped = [rank for rank in start.ranks if rank.first_step_ns is not None]
    if not stepped:
        return []
    rank = max(stepped, key=lambda each: (each.first_step_ns or 0, -each.rank))
    steps: list[PathStep] = []
    at_ns = end_of(rank)
    while at_ns > spawn_of(rank) and len(steps) < MAX_STEPS:
        piece, stage = _before(pieces[rank], at_ns)
        arrived_ns = piece.begin_ns
        other: tuple[RankStart, int] | None = None
        if piece.label == FIRST_STEP:
            other = arrivals.last_to_arrive(rank, stage, arrived_ns, at_ns)
        begin_ns = arrived_ns if other is None else other[1]
        steps.append(PathStep(piece.label, rank.node.name, rank.rank, begin_ns, at_ns))
        at_ns = begin_ns
        if other is not None:
            rank = other[0]
    steps += _walk_nodes(start, rank, at_ns, nodes)
    return list(_joined(reversed(steps)))


def _walk_nodes(start: Start, rank: RankStart, at_ns: int, nodes: Pieces) -> Iterator[PathStep]:
    """Yield steps backwards from the start of a rank to zero."""
    node = rank.node
    can_look = start.is_clocked and len(start.nodes) > 1
    shared = nodes.of_node(node, at_ns)
    for _ in range(MAX_STEPS):
        if at_ns <= 0:
            return
        piece, _ = _before(shared, at_ns)
        other = None
        if can_look and (piece.label == WAITING or _ends_rendezvous(node, piece, at_ns)):
            other = _waited_for(start, node, piece, at_ns)
        begin_ns = piece.begin_ns if other is None else other[1]
        yield PathStep(piece.label, node.name, None, begin_ns, at_ns)
        at_ns = begin_ns
        if other is not None:
            node = other[0]
            shared = nodes.of_node(node, at_ns)


def _waited_for(start: Start, node: NodeStart, piece: Piece, at_ns: int) -> tuple[NodeStart, int] | None:
    """Return the node that arrived last, or whose stage ended last, while this one waited."""
    low_ns = piece.begin_ns + max(MIN_NS, start.error_ns)
    best: tuple[NodeStart, int] | None = None
    for each in start.nodes:
        if each is node:
            continue
        times = [each.zero_ns]
        if piece.label == WAITING:
            times += [span.end_ns for span in each.spans if span.end_ns is not None and _is_work(span.stage)]
        for time_ns in times:
            if low_ns < time_ns < at_ns and (best is None or time_ns > best[1]):
                best = each, time_ns
    return best


def _ends_rendezvous(node: NodeStart, piece: Piece, at_ns: int) -> bool:
    """Return whether the piece ends a rendezvous, rather than one that continued while another stage began."""
    return piece.label == RENDEZVOUS and any(
        span.stage == RENDEZVOUS and span.end_ns == at_ns for span in node.spans
    )


def _is_work(stage: str) -> bool:
    return stage not in (RENDEZVOUS, SPAWN, OTHER)


def _before(pieces: Sequence[Piece], at_ns: int) -> tuple[Piece, str]:
    """Return the piece that leads up to a moment, and the stage before it."""
    low, high = 0, len(pieces) - 1
    while low < high:
        middle = (low + high) // 2
        if pieces[middle].end_ns >= at_ns:
            high = middle
        else:
            low = middle + 1
    return pieces[low], pieces[low - 1].label if low else ""


def _unspanned(pieces: Sequence[Piece]) -> Iterator[tuple[str, int, int]]:
    """Yield each time in the script without a span: the stage before it, its begin and its end."""
    for before, piece in pairwise(pieces):
        if piece.label == FIRST_STEP:
            yield before.label, piece.begin_ns, piece.end_ns


def _joined(steps: Iterator[PathStep]) -> Iterator[PathStep]:
    held: PathStep | None = None
    for step in steps:
        if held is not None and held[:3] == step[:3]:
            held = held._replace(end_ns=step.end_ns)
            continue
        if held is not None:
            yield held
        held = step
    if held is not None:
        yield held
