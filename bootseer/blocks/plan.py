"""In what order blocks are fetched ahead. Pure.

Hot blocks come in the order in which a start touches them, in windows: small ones first, so that the first blocks
are there at once, then larger ones, so that neighbours make one request. Within a window they are read by place.
The others follow in the order of the packs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bootseer.blocks.spans import COLD_SPAN_BYTES, HOT_SPAN_BYTES, MAX_GAP_BYTES, Span, plan_spans
from bootseer.tree.index import BLOCK, Index

FIRST_WINDOW, MOST_WINDOW = 8, 1024  # blocks


def plan_hot(
    index: Index,
    hot: Sequence[int],
    *,
    first_window: int = FIRST_WINDOW,
    most_window: int = MOST_WINDOW,
    span_bytes: int = HOT_SPAN_BYTES,
    max_gap_bytes: int = MAX_GAP_BYTES,
) -> list[Span]:
    """What to read for the blocks of a trace, in order; no block comes later than the others of its window."""
    blocks = list(dict.fromkeys(hot))
    spans: list[Span] = []
    begin, window = 0, first_window
    while begin < len(blocks):
        spans += plan_spans(
            index, blocks[begin : begin + window], span_bytes=span_bytes, max_gap_bytes=max_gap_bytes
        )
        begin, window = begin + window, min(most_window, window * 2)
    return spans


def plan_cold(
    index: Index,
    numbers: Iterable[int],
    *,
    span_bytes: int = COLD_SPAN_BYTES,
    max_gap_bytes: int = MAX_GAP_BYTES,
) -> Iterator[Span]:
    """What to read for the rest, in the order of the packs; planned pack by pack, as it may be much."""
    packs: dict[int, list[tuple[int, int]]] = {}
    for number in numbers:
        _, pack, offset, _, _ = BLOCK.unpack_from(index.blocks, number * BLOCK.size)
        packs.setdefault(pack, []).append((offset, number))
    for pack in sorted(packs):
        ordered = [number for _, number in sorted(packs[pack])]
        yield from plan_spans(index, ordered, span_bytes=span_bytes, max_gap_bytes=max_gap_bytes)
