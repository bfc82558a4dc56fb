"""The order in which blocks are prefetched. Pure.

Hot blocks are fetched in the order in which a start reads them, in windows. Small windows come first, so that the
first blocks are there at once. Larger ones follow, so that neighbours make one request. Within a window blocks are
read by place. The others follow in the order of the packs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from bootseer.blocks.spans import COLD_SPAN_BYTES, HOT_SPAN_BYTES, MAX_GAP_BYTES, Span, plan_spans
from bootseer.tree.index import BLOCK, Index

FIRST_WINDOW, MAX_WINDOW = 8, 1024  # blocks


def plan_hot(
    index: Index,
    hot: Sequence[int],
    *,
    first_window: int = FIRST_WINDOW,
    max_window: int = MAX_WINDOW,
    span_bytes: int = HOT_SPAN_BYTES,
) -> list[Span]:
    """Return the reads for the blocks of a trace, in order; no block comes later than its window."""
    blocks = list(dict.fromkeys(hot))
    spans: list[Span] = []
    begin, window = 0, first_window
    while begin < len(blocks):
        spans += plan_spans(
            index, blocks[begin : begin + window], span_bytes=span_bytes, max_gap_bytes=MAX_GAP_BYTES
        )
        begin, window = begin + window, min(max_window, window * 2)
    return spans


def plan_cold(index: Index, numbers: Iterable[int], *, span_bytes: int = COLD_SPAN_BYTES) -> Iterator[Span]:
    """Yield what to read for the rest, in the order of the packs; planned pack by pack, as it may be much."""
    packs: dict[int, list[tuple[int, int]]] = {}
    for number in numbers:
        _, pack, offset, _, _ = BLOCK.unpack_from(index.blocks, number * BLOCK.size)
        packs.setdefault(pack, []).append((offset, number))
    for pack in sorted(packs):
        ordered = [number for _, number in sorted(packs[pack])]
        yield from plan_spans(index, ordered, span_bytes=span_bytes, max_gap_bytes=MAX_GAP_BYTES)
