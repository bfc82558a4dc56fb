"""Planning which blocks are needed for which files, and in what order. Pure."""

from __future__ import annotations

import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bootseer.tree.index import BLOCK_BYTES, BLOCK_UNITS, HOLE, UNIT_BYTES, Index


class Write(NamedTuple):
    """A piece of a file, and its location in a block."""

    entry: int
    offset: int  # in the file, bytes
    begin: int  # in the block, bytes
    length: int  # bytes


class Plan(NamedTuple):
    """The work to do; each block is in one of the two lists once."""

    hot_blocks: list[int]  # all blocks of hot files: in order of access, then by number
    cold_blocks: list[int]  # the other needed blocks, by number
    hot_files: set[int]
    writes: dict[int, list[Write]]  # by block: to all files with a piece in it
    pieces: dict[int, int]  # by file: its number of writes


def files_of(index: Index) -> list[int]:
    """Return entries of regular files, each by its first name."""
    return [entry for entry, mode in enumerate(index.modes) if stat.S_ISREG(mode) and index.links[entry] == -1]


def plan(index: Index, files: Iterable[int], hot: Sequence[int] = ()) -> Plan:
    """Plan for these files. `hot`: blocks in the order in which a start reads them.

    A file is hot if one of its own blocks is. A file that shares all its blocks is hot if one of these is. So a
    large file does not become hot by its last few bytes, which share a block with small files.
    """
    writes: dict[int, list[Write]] = {}
    pieces: dict[int, int] = {}
    blocks_of: dict[int, list[int]] = {}
    was_touched = set(hot)
    hot_files: set[int] = set()
    for entry in files:
        runs = index.runs[entry]
        if len(runs) == 2 and runs[1] == 1 and runs[0] != HOLE:  # nearly all files
            block, inside = divmod(runs[0], BLOCK_UNITS)
            write = Write(entry, 0, inside * UNIT_BYTES, index.sizes[entry])
            if block in writes:
                writes[block].append(write)
            else:
                writes[block] = [write]
            blocks_of[entry] = [block]
            pieces[entry] = 1
            if block in was_touched:
                hot_files.add(entry)
            continue
        blocks = blocks_of[entry] = []
        own_blocks = []
        for write, block in _writes(index, entry):
            writes.setdefault(block, []).append(write)
            blocks.append(block)
            if write.length == BLOCK_BYTES:
                own_blocks.append(block)
        pieces[entry] = len(blocks)
        if not was_touched.isdisjoint(own_blocks or blocks):
            hot_files.add(entry)
    needed = {block for entry in hot_files for block in blocks_of[entry]}
    hot_blocks = [block for block in dict.fromkeys(hot) if block in needed]
    hot_blocks += sorted(needed.difference(hot_blocks))
    cold_blocks = sorted(block for block in writes if block not in needed)
    return Plan(hot_blocks, cold_blocks, hot_files, writes, pieces)


def batches(blocks: Sequence[int], most: int) -> Iterator[list[int]]:
    """Yield batches of up to `most` blocks, each sorted."""
    for begin in range(0, len(blocks), most):
        yield sorted(blocks[begin : begin + most])


def apart(batches: Sequence[list[int]], count: int) -> list[list[int]]:
    """Reorder batches, so that `count` concurrent takers work on different parts."""
    length = -(-len(batches) // max(1, count))
    return [batches[place] for offset in range(length) for place in range(offset, len(batches), length)]


def _writes(index: Index, entry: int) -> Iterator[tuple[Write, int]]:
    """Yield the writes of a file, with the block of each."""
    runs, size, offset = index.runs[entry], index.sizes[entry], 0
    for place in range(0, len(runs), 2):
        address, count = runs[place], runs[place + 1]
        if address != HOLE:
            block, inside = divmod(address, BLOCK_UNITS)
            for number in range(count):
                begin = offset + number * BLOCK_BYTES
                length = min(BLOCK_BYTES, size - begin)
                yield Write(entry, begin, inside * UNIT_BYTES, length), block + number
        offset += count * BLOCK_BYTES
