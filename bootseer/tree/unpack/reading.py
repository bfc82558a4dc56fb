"""Blocks from the packs of a local directory, for one thread that only reads.

Like StoreBlocks, with the same checks, but without its machinery for remote stores: adjacent blocks are read at
once into a kept buffer. Missing or damaged blocks are requested from another source, which reports the error.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.storage.local.reading import read_range
from bootseer.tree.block_codec import block_digest, unpack_block
from bootseer.tree.index import BLOCK_BYTES, Block, Index

if TYPE_CHECKING:
    from bootseer.tree.reading import BlockSource

WINDOW_BLOCKS = 32


class LocalBlocks:
    """A `BlockSource`. For one thread."""

    def __init__(self, folder: str, index: Index, others: BlockSource) -> None:
        """`folder`: of the tree; `others`: a source of the same blocks, for those that are unreadable here."""
        self._directory, self._index, self._others = folder, index, others
        # Page-aligned, so that cold bytes can be read straight from the disk.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = memoryview(mmap.mmap(-1, WINDOW_BLOCKS * BLOCK_BYTES + mmap.PAGESIZE, flags=flags))
        self._refused_direct: set[int] = set()

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes | memoryview]]:
        """Read blocks in the order of `numbers`; those of `others` come last. Raises: as `others`."""
        missing: list[int] = []
        for begin in range(0, len(numbers), WINDOW_BLOCKS):
            window = [(number, self._index.block(number)) for number in numbers[begin : begin + WINDOW_BLOCKS]]
            for number, block, stored in self._read(window):
                raw = _unpack(block, stored)
                if raw is None:
                    missing.append(number)
                else:
                    yield number, raw
        if missing:
            yield from self._others.read_blocks(missing)

    def _read(self, window: Sequence[tuple[int, Block]]) -> Iterator[tuple[int, Block, memoryview]]:
        """Yield the unverified stored bytes of each block, empty if unreadable; valid until the next one."""
        for first, last in _together([block for _, block in window]):
            pack, offset = window[first][1].pack, window[first][1].offset
            length = window[last][1].offset + window[last][1].stored_bytes - offset
            start = offset % mmap.PAGESIZE
            target = self._memory[start : start + length]
            try:
                path = os.path.join(self._directory, self._index.pack_path(pack))
                read_range(path, offset, target, "", self._refused_direct)
            except BootseerError:
                length = 0
            for number, block in window[first : last + 1]:
                begin = block.offset - offset
                yield number, block, target[begin : begin + block.stored_bytes] if length else target[:0]


def _together(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """Yield first and last index of blocks that are adjacent in one pack."""
    first = 0
    for place in range(1, len(blocks) + 1):
        if place < len(blocks):
            last, block = blocks[place - 1], blocks[place]
            if block.pack == last.pack and block.offset == last.offset + last.stored_bytes:
                continue
        yield first, place - 1
        first = place


def _unpack(block: Block, stored: memoryview) -> bytes | None:
    """Unpack a block; return None if it is not the block of the index."""
    if len(stored) != block.stored_bytes or block_digest(stored) != block.digest:
        return None
    try:
        return bytes(unpack_block(stored, block.raw_bytes, ""))  # `stored` is a reused buffer
    except BootseerError:
        return None
