"""Portions of a tree for several processes: which files each gets, and an index of just these. Pure.

A portion is a tree of its own: some files, their further names, the folders on the way. Whoever has no work takes
the next one; they get smaller towards the end, so that all are done at about the same time.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bootseer.tree.index import BLOCK_BYTES, HOLE, Index

FILE_COST_BYTES = 32 << 10  # making a file takes as long as writing so much
LEAST_COST_BYTES = 24 << 20  # of a portion: less is handed over slower than it is written
_LARGE = 8  # a file that is more than one such part of what a process gets comes alone, and first
_AHEAD = 3  # a portion is one such part of what is left for each process


class Portion(NamedTuple):
    """What one process writes at a time."""

    tree: Index  # without packs and blocks, which are those of the whole tree
    files: int  # regular ones, by their first names
    written_bytes: int  # without holes


def portions(
    index: Index, files: Sequence[int], links: Mapping[int, Sequence[int]], count: int
) -> Iterator[Portion]:
    """Of these files, for so many processes. `links`: further names of entries."""
    costs = [FILE_COST_BYTES + index.sizes[entry] for entry in files]
    left = sum(costs)
    large_cost = max(LEAST_COST_BYTES, left // (_LARGE * count))
    large = [(cost, entry) for cost, entry in zip(costs, files, strict=True) if cost > large_cost]
    for cost, entry in sorted(large, key=lambda each: (-each[0], each[1])):
        left -= cost
        yield portion(index, [entry], links)
    # Neighbours share blocks: each block is unpacked once, but for those at the ends.
    others = [entry for cost, entry in zip(costs, files, strict=True) if cost <= large_cost]
    runs = index.runs
    others.sort(key=lambda entry: runs[entry][0] if runs[entry] else HOLE)
    chosen: list[int] = []
    cost, most_cost = 0, max(LEAST_COST_BYTES, left // (_AHEAD * count))
    for entry in others:
        chosen.append(entry)
        cost += FILE_COST_BYTES + index.sizes[entry]
        if cost >= most_cost:
            left -= cost
            yield portion(index, chosen, links)
            chosen = []
            cost, most_cost = 0, max(LEAST_COST_BYTES, left // (_AHEAD * count))
    if chosen:
        yield portion(index, chosen, links)


def folders_left(index: Index, files: Sequence[int], links: Mapping[int, Sequence[int]]) -> set[int]:
    """Folders that whoever hands out portions of these files makes: those above what is in no portion.

    Folders without a file below are among it, and links; those above them may be made by others as well.
    """
    in_portions = {0}
    for entry in files:
        for name in (entry, *links.get(entry, ())):
            _add_above(index, name, in_portions)
    left = {0}
    for entry, mode in enumerate(index.modes):
        if stat.S_ISDIR(mode) and entry not in in_portions:
            left.add(entry)
            _add_above(index, entry, left)
        elif not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            _add_above(index, entry, left)
    return left


def _add_above(index: Index, entry: int, folders: set[int]) -> None:
    folder = index.parents[entry]
    while folder not in folders:
        folders.add(folder)
        folder = index.parents[folder]


def portion(index: Index, files: Sequence[int], links: Mapping[int, Sequence[int]]) -> Portion:
    """Of just these files."""
    parents, modes = index.parents, index.modes
    kept = {0}
    for entry in files:
        for name in (entry, *links.get(entry, ())):
            kept.add(name)
            _add_above(index, name, kept)
    entries = sorted(kept)
    places = {entry: here for here, entry in enumerate(entries)}
    own = Index(
        tool=index.tool,
        packs=[],
        blocks=b"",
        parents=[places[parents[entry]] for entry in entries],
        names=[index.names[entry] for entry in entries],
        modes=[modes[entry] for entry in entries],
        uids=[index.uids[entry] for entry in entries],
        gids=[index.gids[entry] for entry in entries],
        mtimes_ns=[index.mtimes_ns[entry] for entry in entries],
        sizes=[index.sizes[entry] for entry in entries],
        runs=[index.runs[entry] for entry in entries],
        targets=[b""] * len(entries),
        links=[-1 if index.links[entry] == -1 else places[index.links[entry]] for entry in entries],
        xattrs={places[entry]: index.xattrs[entry] for entry in entries if entry in index.xattrs},
    )
    return Portion(own, len(files), sum(_data_bytes(index, entry) for entry in files))


def _data_bytes(index: Index, entry: int) -> int:
    """Of a file, without holes."""
    runs, size = index.runs[entry], index.sizes[entry]
    if len(runs) == 2:
        return 0 if runs[0] == HOLE else size
    found = offset = 0
    for place in range(0, len(runs), 2):
        length = min(runs[place + 1] * BLOCK_BYTES, size - offset)
        found += 0 if runs[place] == HOLE else length
        offset += length
    return found
