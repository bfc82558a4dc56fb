"""Portions of a tree for several processes: the files of each, and an index of just these. Pure.

A portion is a tree of its own: some files, their additional names, the directories on their paths. An idle process
takes the next portion. Portions get smaller towards the end, so that all processes end at about the same time.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bootseer.tree.index import BLOCK_BYTES, HOLE, Index

FILE_COST_BYTES = 32 << 10  # making a file takes as long as writing so much
MIN_COST_BYTES = 24 << 20  # of a portion: handing over less is slower than writing it
_LARGE = 8  # a file larger than this fraction of a process's share comes alone, and first
_AHEAD = 3  # a portion is this fraction of the rest for each process


class Portion(NamedTuple):
    """The files that one process writes at a time."""

    tree: Index  # without packs and blocks, which are those of the whole tree
    files: int  # regular ones, by their first names
    written_bytes: int  # without holes


def portions(
    index: Index, files: Sequence[int], links: Mapping[int, Sequence[int]], count: int
) -> Iterator[Portion]:
    """Yield portions of these files for `count` processes. `links`: additional names of entries."""
    costs = [FILE_COST_BYTES + index.sizes[entry] for entry in files]
    left = sum(costs)
    large_cost = max(MIN_COST_BYTES, left // (_LARGE * count))
    large = [(cost, entry) for cost, entry in zip(costs, files, strict=True) if cost > large_cost]
    for cost, entry in sorted(large, key=lambda each: (-each[0], each[1])):
        left -= cost
        yield portion(index, [entry], links)
    # Neighbours share blocks: each block is unpacked once, except for those at the ends.
    others = [entry for cost, entry in zip(costs, files, strict=True) if cost <= large_cost]
    runs = index.runs
    others.sort(key=lambda entry: runs[entry][0] if runs[entry] else HOLE)
    chosen: list[int] = []
    cost, max_cost = 0, max(MIN_COST_BYTES, left // (_AHEAD * count))
    for entry in others:
        chosen.append(entry)
        cost += FILE_COST_BYTES + index.sizes[entry]
        if cost >= max_cost:
            left -= cost
            yield portion(index, chosen, links)
            chosen = []
            cost, max_cost = 0, max(MIN_COST_BYTES, left // (_AHEAD * count))
    if chosen:
        yield portion(index, chosen, links)


def directories_in_no_portion(index: Index, files: Sequence[int], links: Mapping[int, Sequence[int]]) -> set[int]:
    """Return the directories that the distributor of portions makes: those above entries in no portion.

    These entries include directories without a file below, and links. Other processes may make those above as
    well.
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


def _add_above(index: Index, entry: int, directories: set[int]) -> None:
    directory = index.parents[entry]
    while directory not in directories:
        directories.add(directory)
        directory = index.parents[directory]


def portion(index: Index, files: Sequence[int], links: Mapping[int, Sequence[int]]) -> Portion:
    """Return a portion of just these files."""
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
    """Return the bytes of a file, without holes."""
    runs, size = index.runs[entry], index.sizes[entry]
    if len(runs) == 2:
        return 0 if runs[0] == HOLE else size
    found = offset = 0
    for place in range(0, len(runs), 2):
        length = min(runs[place + 1] * BLOCK_BYTES, size - offset)
        found += 0 if runs[place] == HOLE else length
        offset += length
    return found
