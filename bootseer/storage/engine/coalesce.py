"""Planning of reads from a store for the ranges that callers request. Pure.

Large ranges are read straight into their targets, cut at multiples of the piece size in the file. So pieces keep
the file's alignment and cross no block. Small neighbouring ranges of a file are read together into a buffer and
copied out: the copy and the gap cost less than one more request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

PIECE_BYTES = 8 * 1024**2
MAX_GAP_BYTES = 128 * 1024  # about what a stream transfers in the time of one more request
SMALL_BYTES = 1024**2  # above it a copy costs more than a request


class WantedRange(NamedTuple):
    """A range that a caller requests."""

    path: str
    etag: str
    offset: int  # bytes
    length: int  # bytes


class PiecePart(NamedTuple):
    """The bytes of a piece that belong to a request."""

    request: int  # index
    request_offset: int  # bytes, from the request's start
    piece_offset: int  # bytes, from the piece's start
    length: int  # bytes


class PlannedRead(NamedTuple):
    """One read from the store. Bytes that no part covers are gaps."""

    path: str
    etag: str
    offset: int  # bytes
    length: int  # bytes
    parts: tuple[PiecePart, ...]

    @property
    def is_direct(self) -> bool:
        """Whether the store can read it straight into the target of its only request."""
        return len(self.parts) == 1

    @property
    def gap_bytes(self) -> int:
        """Bytes that are read without a request for them."""
        unwanted, reached = 0, 0
        for part in self.parts:  # in order of their piece_offset
            unwanted += max(0, part.piece_offset - reached)
            reached = max(reached, part.piece_offset + part.length)
        return unwanted


def plan_pieces(
    wanted: Iterable[WantedRange],
    *,
    piece_bytes: int = PIECE_BYTES,
    max_gap_bytes: int = MAX_GAP_BYTES,
    small_bytes: int = SMALL_BYTES,
) -> list[PlannedRead]:
    """Plan reads that cover all of `wanted`, in the order of the requests; none exceeds `piece_bytes`."""
    small_bytes = min(small_bytes, piece_bytes)
    pieces: list[tuple[int, PlannedRead]] = []  # with the first request that needs it
    small: dict[tuple[str, str], list[tuple[int, int, int]]] = {}  # offset, end, request
    for index, each in enumerate(wanted):
        if each.length > small_bytes:
            pieces += [(index, piece) for piece in _cut(index, each, piece_bytes)]
        elif each.length:
            end = each.offset + each.length
            small.setdefault((each.path, each.etag), []).append((each.offset, end, index))
    for (path, etag), ranges in small.items():
        for group in _group(sorted(ranges), piece_bytes, max_gap_bytes):
            pieces.append((min(index for _, _, index in group), _join(path, etag, group)))
    pieces.sort(key=lambda each: each[0])  # stable: the pieces of one request stay in order
    return [piece for _, piece in pieces]


def _cut(index: int, wanted: WantedRange, piece_bytes: int) -> Iterator[PlannedRead]:
    offset, end = wanted.offset, wanted.offset + wanted.length
    while offset < end:
        length = min(end, (offset // piece_bytes + 1) * piece_bytes) - offset
        part = PiecePart(index, offset - wanted.offset, 0, length)
        yield PlannedRead(wanted.path, wanted.etag, offset, length, (part,))
        offset += length


def _group(
    ranges: list[tuple[int, int, int]], piece_bytes: int, max_gap_bytes: int
) -> Iterator[list[tuple[int, int, int]]]:
    """Group neighbours that are worth one read; `ranges` are sorted."""
    group: list[tuple[int, int, int]] = []
    reached = 0
    for each in ranges:
        offset, end, _ = each
        if group and (offset - reached > max_gap_bytes or end - group[0][0] > piece_bytes):
            yield group
            group = []
        reached = max(reached, end) if group else end
        group.append(each)
    if group:
        yield group


def _join(path: str, etag: str, group: list[tuple[int, int, int]]) -> PlannedRead:
    begin = group[0][0]
    end = max(end for _, end, _ in group)
    parts = tuple(PiecePart(index, 0, offset - begin, stop - offset) for offset, stop, index in group)
    return PlannedRead(path, etag, begin, end - begin, parts)
