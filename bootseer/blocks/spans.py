"""Ranges of packs to read for the wanted blocks. Pure.

Neighbours in a pack are read together: a request costs as much as some hundred KiB of a fast link, and the blocks
of a file lie side by side. A span lies in one pack and is not longer than the memory that it is read into.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bootseer.tree.index import Index

MAX_GAP_BYTES = 128 << 10  # of unwanted bytes read to save a request, which also costs CPU
HOT_SPAN_BYTES = 1 << 20
COLD_SPAN_BYTES = 4 << 20


class StoredBlock(NamedTuple):
    number: int
    digest: bytes  # SHA-256 of the stored bytes
    offset: int  # in the pack, bytes
    stored_bytes: int
    raw_bytes: int

    @property
    def end(self) -> int:
        return self.offset + self.stored_bytes


class Span(NamedTuple):
    """Blocks of one pack that are read together, in the order of their offsets."""

    pack: int
    blocks: tuple[StoredBlock, ...]

    @property
    def offset(self) -> int:
        return self.blocks[0].offset

    @property
    def length(self) -> int:
        """Bytes from the start of the first block to the end of the last one."""
        return max(block.end for block in self.blocks) - self.blocks[0].offset

    @property
    def numbers(self) -> list[int]:
        return [block.number for block in self.blocks]


def plan_spans(
    index: Index, numbers: Iterable[int], *, span_bytes: int = HOT_SPAN_BYTES, max_gap_bytes: int = MAX_GAP_BYTES
) -> list[Span]:
    """Return the spans with these blocks, each in one of them, in the order in which `numbers` first need them.

    A span is longer than `span_bytes` only if it has one block.
    """
    order: dict[int, int] = {}
    for number in numbers:
        order.setdefault(number, len(order))
    stored = []
    for number in order:
        digest, pack, offset, stored_bytes, raw_bytes = index.block(number)
        stored.append((pack, offset, StoredBlock(number, digest, offset, stored_bytes, raw_bytes)))
    stored.sort()
    spans: list[tuple[int, list[StoredBlock]]] = []
    for pack, _, block in stored:
        if spans and spans[-1][0] == pack:
            blocks = spans[-1][1]
            reached = max(blocks[-1].end, block.end)
            if block.offset - blocks[-1].end <= max_gap_bytes and reached - blocks[0].offset <= span_bytes:
                blocks.append(block)
                continue
        spans.append((pack, [block]))
    spans.sort(key=lambda span: min(order[block.number] for block in span[1]))
    return [Span(pack, tuple(blocks)) for pack, blocks in spans]


def runs_of(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of consecutive numbers, in the order given."""
    first = count = 0
    for number in numbers:
        if count and number != first + count:
            yield first, count
            count = 0
        if not count:
            first = number
        count += 1
    if count:
        yield first, count
