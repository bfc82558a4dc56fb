"""PURE: the part of an environment's tree that belongs to one target, as a tree of its own.

In: the validated index of the whole tree, the name of a directory in its root. Out: an index of the files of the
target, with the same blocks; and a separate list of names to delete, as a plain directory has no whiteouts.
"""

from __future__ import annotations

import stat
from typing import NamedTuple

import msgspec

from bootseer.errors import IntegrityError
from bootseer.tree.index import Index


class Subtree(NamedTuple):
    """A part of a tree. Paths are relative to the target, "" for itself."""

    tree: Index  # without whiteouts and opaque directories
    deleted: list[bytes]  # paths to delete
    opaque: set[int]  # entries of directories that hide the earlier content


def subtree(index: Index, name: bytes) -> Subtree:
    """Return the part below the directory `name` of the root. Raises: IntegrityError if it is missing."""
    parents, names, modes, rdevs = index.parents, index.names, index.modes, index.rdevs
    roots = [entry for entry in range(1, len(index)) if parents[entry] == 0 and names[entry] == name]
    if not roots or not stat.S_ISDIR(modes[roots[0]]):
        raise IntegrityError(f"the tree has no directory {name.decode(errors='replace')!r} for that target")
    if _is_all(index, roots[0]):
        return Subtree(_without_root(index), [], {entry - 1 for entry in index.opaque if entry})
    places = {roots[0]: 0}  # entry of the whole tree -> entry of the part
    kept = [roots[0]]
    gone = []
    for entry in range(roots[0] + 1, len(index)):
        if parents[entry] not in places:
            continue
        if stat.S_ISCHR(modes[entry]) and rdevs.get(entry) == (0, 0):
            gone.append(entry)
            continue
        places[entry] = len(kept)
        kept.append(entry)
    links = []
    owners = []  # entries of the whole tree that have the data
    first_of: dict[int, int] = {}  # file of the whole tree -> entry of its first name in the part
    for here, entry in enumerate(kept):
        first = entry if index.links[entry] == -1 else index.links[entry]
        known = first_of.setdefault(first, here)
        links.append(-1 if known == here else known)
        owners.append(first if known == here else entry)
    below = msgspec.structs.replace(
        index,
        parents=[0, *(places[parents[entry]] for entry in kept[1:])],
        names=[b"", *(names[entry] for entry in kept[1:])],
        modes=[modes[entry] for entry in kept],
        uids=[index.uids[entry] for entry in kept],
        gids=[index.gids[entry] for entry in kept],
        mtimes_ns=[index.mtimes_ns[entry] for entry in kept],
        sizes=[index.sizes[entry] for entry in kept],
        runs=[index.runs[entry] for entry in owners],
        targets=[index.targets[entry] for entry in kept],
        links=links,
        rdevs={here: rdevs[entry] for here, entry in enumerate(kept) if entry in rdevs},
        xattrs={here: index.xattrs[entry] for here, entry in enumerate(owners) if entry in index.xattrs},
        opaque=[],
    )
    return Subtree(
        below,
        [_path(below, places[parents[entry]], names[entry]) for entry in gone],
        {places[entry] for entry in index.opaque if entry in places},
    )


def _is_all(index: Index, directory: int) -> bool:
    """Return whether this directory is the only one, and nothing in it is a whiteout."""
    is_alone = directory == 1 and index.parents.count(0) == 2  # the root and this directory
    return is_alone and not any(
        rdev == (0, 0) and stat.S_ISCHR(index.modes[entry]) for entry, rdev in index.rdevs.items()
    )


def _without_root(index: Index) -> Index:
    """Return the only directory in the root as a tree, with entries renumbered."""
    return msgspec.structs.replace(
        index,
        parents=[0, *(parent - 1 for parent in index.parents[2:])],
        names=[b"", *index.names[2:]],
        modes=index.modes[1:],
        uids=index.uids[1:],
        gids=index.gids[1:],
        mtimes_ns=index.mtimes_ns[1:],
        sizes=index.sizes[1:],
        runs=index.runs[1:],
        targets=index.targets[1:],
        links=[link if link == -1 else link - 1 for link in index.links[1:]],
        rdevs={entry - 1: rdev for entry, rdev in index.rdevs.items() if entry},
        xattrs={entry - 1: pairs for entry, pairs in index.xattrs.items() if entry},
        opaque=[],
    )


def _path(index: Index, directory: int, name: bytes) -> bytes:
    above = index.path(directory)
    return above + b"/" + name if above else name
