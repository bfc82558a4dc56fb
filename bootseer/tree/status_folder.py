"""The place of the status folder in a tree: an empty directory in its root, on which the folder is mounted.

It is added to the index that a mount is made of, never to a stored one. Builders leave it out.
"""

from __future__ import annotations

import os
import stat
from typing import TypeVar

from msgspec import structs

from bootseer.tree.index import Index

NAME = ".bootseer"
MODE = 0o555
MARK_NS = 184_579_566  # its time of change, and that of the mounted folder: an own directory of a tree has another

T = TypeVar("T")


def is_marked(found: os.stat_result) -> bool:
    """Return whether this is the place of the status folder, or the folder itself, not a tree's own directory."""
    return found.st_mode == stat.S_IFDIR | MODE and found.st_mtime_ns == MARK_NS


def with_place(index: Index) -> Index:
    """Return the index of the same tree with the place; the index itself if its root has such a name already.

    `index` may be unchecked: the result is as wrong then.
    """
    name, at, entry = NAME.encode(), 1, 0
    while True:
        try:
            entry = index.parents.index(0, entry + 1)
        except ValueError:
            break
        if entry < len(index.names) and index.names[entry] >= name:
            if index.names[entry] == name:
                return index
            at = entry
            break
        at = entry + 1

    has_links = index.links.count(-1) != len(index.links)

    def moved(number: int) -> int:
        return number + (number >= at)

    return structs.replace(
        index,
        parents=[*index.parents[:at], 0, *[each + (each >= at) for each in index.parents[at:]]],
        names=_with(index.names, at, name),
        modes=_with(index.modes, at, stat.S_IFDIR | MODE),
        uids=_with(index.uids, at, 0),
        gids=_with(index.gids, at, 0),
        mtimes_ns=_with(index.mtimes_ns, at, MARK_NS),
        sizes=_with(index.sizes, at, 0),
        runs=_with(index.runs, at, []),
        targets=_with(index.targets, at, b""),
        links=_with([each + (each >= at) for each in index.links] if has_links else index.links, at, -1),
        rdevs={moved(number): each for number, each in index.rdevs.items()},
        xattrs={moved(number): each for number, each in index.xattrs.items()},
        opaque=list(map(moved, index.opaque)),
    )


def _with(column: list[T], at: int, value: T) -> list[T]:
    return [*column[:at], value, *column[at:]]
