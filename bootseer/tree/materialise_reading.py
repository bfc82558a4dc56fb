"""Blocks from the packs of a folder of this machine, for one thread that does nothing else meanwhile.

As StoreBlocks, and with its care, but without its machinery for stores that are far: what lies together is read
at once into memory that is kept. What is not as it should be is asked of another source, which says what is wrong.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bootseer.errors import BootseerError
from bootseer.storage.local_reading import read_range
from bootseer.tree.block_codec import block_digest, unpack_block
from bootseer.tree.index import BLOCK_BYTES, Block, Index

if TYPE_CHECKING:
    from bootseer.tree.reading import BlockSource

WINDOW_BLOCKS = 32


class FolderBlocks:
    """A `BlockSource`. For one thread."""

    def __init__(self, folder: str, index: Index, others: BlockSource) -> None:
        """`folder`: of the tree; `others`: has the same blocks, for what cannot be read here."""
        self._folder, self._index, self._others = folder, index, others
        # Where it begins a page, so that cold bytes can come straight from the disk.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._memory = memoryview(mmap.mmap(-1, WINDOW_BLOCKS * BLOCK_BYTES + mmap.PAGESIZE, flags=flags))
        self._refused_direct: set[int] = set()

    def read_blocks(self, numbers: Sequence[int], /) -> Iterator[tuple[int, bytes | memoryview]]:
        """In the order of `numbers`, but for what others have to give. Raises: as `others`."""
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
        """Stored bytes of each, not verified; empty where they could not be read. Good until the next one."""
        for first, last in _together([block for _, block in window]):
            pack, offset = window[first][1].pack, window[first][1].offset
            length = window[last][1].offset + window[last][1].stored_bytes - offset
            start = offset % mmap.PAGESIZE
            target = self._memory[start : start + length]
            try:
                path = os.path.join(self._folder, self._index.pack_path(pack))
                read_range(path, offset, target, "", self._refused_direct)
            except BootseerError:
                length = 0
            for number, block in window[first : last + 1]:
                begin = block.offset - offset
                yield number, block, target[begin : begin + block.stored_bytes] if length else target[:0]


def _together(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """First and last place of those that follow each other in one pack."""
    first = 0
    for place in range(1, len(blocks) + 1):
        if place < len(blocks):
            last, block = blocks[place - 1], blocks[place]
            if block.pack == last.pack and block.offset == last.offset + last.stored_bytes:
                continue
        yield first, place - 1
        first = place


def _unpack(block: Block, stored: memoryview) -> bytes | None:
    """None unless it is the block of the index."""
    if len(stored) != block.stored_bytes or block_digest(stored) != block.digest:
        return None
    try:
        return bytes(unpack_block(stored, block.raw_bytes, ""))  # `stored` is memory that is used again
    except BootseerError:
        return None
