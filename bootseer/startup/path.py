"""PURE: the critical path: which chain of stages, on which node and rank, decided the first step of the last rank.

Walked backwards from that step. Where ranks went on together (none before the last one had come, and then all at
once) the way leads to the last one to come; where a node waited, to the node that was late or whose stage ended
last. Between nodes only by the job's clock. The steps follow each other without a gap from zero to the first step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

from bootseer.startup.pieces import PEERS, WAITING, Piece, Pieces, end_of, spawn_of
from bootseer.startup.starts import FIRST_STEP, OTHER, RENDEZVOUS, SPAWN, NodeStart, RankStart, Start

LEAST_NS = 10_000_000  # shorter waits are no reason to look elsewhere
AT_ONCE_NS, AT_ONCE_SHARE, NEARLY_ALL = 50_000_000, 0.25, 0.9
MOST_STEPS = 1000


class PathStep(NamedTuple):
    """A part of the critical path; `rank` is None where the whole node was at it."""

    label: str
    node: str
    rank: int | None
    begin_ns: int
    end_ns: int


class _Phase:
    """All ranks after the same stage, in their script: when each came there and when it went on."""

    __slots__ = ("_first_ns", "_lefts_ns", "is_together", "last", "last_ns")

    def __init__(self) -> None:
        self.last: RankStart | None = None
        self.last_ns = -1
        self._first_ns = 2**63
        self._lefts_ns: list[int] = []
        self.is_together = False

    def add(self, rank: RankStart, came_ns: int, left_ns: int) -> None:
        if came_ns > self.last_ns:
            self.last, self.last_ns = rank, came_ns
        self._first_ns = min(self._first_ns, came_ns)
        self._lefts_ns.append(left_ns)

    def finish(self) -> None:
        """They waited for each other: nobody went on before the last one came, and then nearly all did at once."""
        lefts_ns = sorted(self._lefts_ns)
        most_ns = lefts_ns[math.ceil(len(lefts_ns) * NEARLY_ALL) - 1]
        at_once_ns = max(AT_ONCE_NS, (self.last_ns - self._first_ns) * AT_ONCE_SHARE)
        self.is_together = self.last_ns <= lefts_ns[0] and most_ns - lefts_ns[0] <= at_once_ns


class Arrivals:
    """Where ranks waited for the last of them; `pieces` are those of each rank."""

    def __init__(self, start: Start, pieces: Mapping[RankStart, Sequence[Piece]]) -> None:
        self._is_clocked = start.is_clocked
        self._phases: dict[tuple[str, str], _Phase] = {}
        for rank in start.ranks:
            if rank.first_step_ns is None:
                continue
            last = {stage: (came_ns, left_ns) for stage, came_ns, left_ns in _rests(pieces[rank])}
            for stage, (came_ns, left_ns) in last.items():
                phase = self._phases.setdefault(self._key(rank, stage), _Phase())
                phase.add(rank, came_ns, left_ns)
        for phase in self._phases.values():
            phase.finish()

    def last_to_come(
        self, rank: RankStart, stage: str, came_ns: int, left_ns: int
    ) -> tuple[RankStart, int] | None:
        """Another rank that this one, there from `came_ns`, waited for after `stage`; and when it came."""
        phase = self._phases.get(self._key(rank, stage))
        if phase is None or phase.last is None or phase.last is rank or not phase.is_together:
            return None
        if came_ns + LEAST_NS < phase.last_ns < left_ns:
            return phase.last, phase.last_ns
        return None

    def split(self, rank: RankStart, pieces: Sequence[Piece]) -> list[Piece]:
        """The pieces with the time in which a rank waited for the last one as pieces of their own."""
        found: list[Piece] = []
        stage = ""
        for piece in pieces:
            if piece.label == FIRST_STEP:
                other = self.last_to_come(rank, stage, piece.begin_ns, piece.end_ns)
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
    """The critical path, in the order of time; empty when no first step was observed."""
    stepped = [rank for rank in start.ranks if rank.first_step_ns is not None]
    if not stepped:
        return []
    rank = max(stepped, key=lambda each: (each.first_step_ns or 0, -each.rank))
    steps: list[PathStep] = []
    at_ns = end_of(rank)
    while at_ns > spawn_of(rank) and len(steps) < MOST_STEPS:
        piece, stage = _before(pieces[rank], at_ns)
        came_ns = piece.begin_ns
        other: tuple[RankStart, int] | None = None
        if piece.label == FIRST_STEP:
            other = arrivals.last_to_come(rank, stage, came_ns, at_ns)
        begin_ns = came_ns if other is None else other[1]
        steps.append(PathStep(piece.label, rank.node.name, rank.rank, begin_ns, at_ns))
        at_ns = begin_ns
        if other is not None:
            rank = other[0]
    steps += _walk_nodes(start, rank, at_ns, nodes)
    return list(_joined(reversed(steps)))


def _walk_nodes(start: Start, rank: RankStart, at_ns: int, nodes: Pieces) -> Iterator[PathStep]:
    """Backwards from the start of a rank to zero."""
    node = rank.node
    can_look = start.is_clocked and len(start.nodes) > 1
    shared = nodes.of_node(node, at_ns)
    for _ in range(MOST_STEPS):
        if at_ns <= 0:
            return
        piece, _ = _before(shared, at_ns)
        other = None
        if can_look and (piece.label == WAITING or _is_met(node, piece, at_ns)):
            other = _waited_for(start, node, piece, at_ns)
        begin_ns = piece.begin_ns if other is None else other[1]
        yield PathStep(piece.label, node.name, None, begin_ns, at_ns)
        at_ns = begin_ns
        if other is not None:
            node = other[0]
            shared = nodes.of_node(node, at_ns)


def _waited_for(start: Start, node: NodeStart, piece: Piece, at_ns: int) -> tuple[NodeStart, int] | None:
    """The node that came last, or whose stage ended last, while this one waited."""
    low_ns = piece.begin_ns + max(LEAST_NS, start.error_ns)
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


def _is_met(node: NodeStart, piece: Piece, at_ns: int) -> bool:
    """The piece is the end of a rendezvous, not one that went on while something else began."""
    return piece.label == RENDEZVOUS and any(
        span.stage == RENDEZVOUS and span.end_ns == at_ns for span in node.spans
    )


def _is_work(stage: str) -> bool:
    return stage not in (RENDEZVOUS, SPAWN, OTHER)


def _before(pieces: Sequence[Piece], at_ns: int) -> tuple[Piece, str]:
    """The piece that leads up to a moment, and the stage before it."""
    low, high = 0, len(pieces) - 1
    while low < high:
        middle = (low + high) // 2
        if pieces[middle].end_ns >= at_ns:
            high = middle
        else:
            low = middle + 1
    return pieces[low], pieces[low - 1].label if low else ""


def _rests(pieces: Sequence[Piece]) -> Iterator[tuple[str, int, int]]:
    """Each time in the script that belongs to no span: the stage before it, when it began and when it ended."""
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
