"""The order in which blocks are prefetched. Pure.

Hot blocks are fetched in the order in which a start reads them, in windows. Small windows come first, so that the
first blocks are there at once. Larger ones follow, so that neighbours make one request. Within a window blocks are
read by place. The others follow in the order of the packs.

Where nobody knows what a start reads, blocks near those that readers have waited for come first: the files of a
package lie side by side.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from bootseer.blocks.spans import COLD_SPAN_BYTES, HOT_SPAN_BYTES, MAX_GAP_BYTES, Span, plan_spans
from bootseer.tree.index import BLOCK, Index

FIRST_WINDOW, MAX_WINDOW = 8, 1024  # blocks
NEAR_BLOCKS, MAX_NEAR = 64, 64  # after a block that a reader has waited for; such blocks that are remembered


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


class NearDemand:
    """Spans of all these blocks, each in one of them: those near the last demands first, then the others in order.

    Iterate once; `want` may be called meanwhile.
    """

    def __init__(self, index: Index, numbers: Iterable[int], *, span_bytes: int = HOT_SPAN_BYTES) -> None:
        self._index, self._span_bytes = index, span_bytes
        self._left = bytearray(index.block_count)
        for number in numbers:
            self._left[number] = 1
        self._wanted: deque[int] = deque(maxlen=MAX_NEAR)

    def want(self, number: int) -> None:
        """Fetch the blocks that follow this one next; the reader fetches it itself."""
        self._take(number)
        self._wanted.append(number + 1)

    def __iter__(self) -> Iterator[Span]:
        at = 0
        while True:
            if self._wanted:
                begin = self._wanted.pop()
            else:
                at = begin = self._left.find(1, at)
                if at < 0:
                    return
            numbers = [number for number in range(begin, begin + NEAR_BLOCKS) if self._take(number)]
            yield from plan_spans(self._index, numbers, span_bytes=self._span_bytes, max_gap_bytes=MAX_GAP_BYTES)

    def _take(self, number: int) -> bool:
        is_left = number < len(self._left) and self._left[number] == 1
        if is_left:
            self._left[number] = 0
        return is_left
