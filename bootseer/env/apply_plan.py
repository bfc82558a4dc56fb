"""PURE: how an unpacked difference gets into a folder that exists already, with as few renames as possible.

In: the difference (subtree.py), and what the folder has where the two meet. Out: steps, each of which is one
rename, and the folders that both have, whose attributes are set at the end. A whole new folder is one step,
however much is in it.

Source: as overlayfs merges an upper folder into a lower one (Documentation/filesystems/overlayfs.rst).
"""

from __future__ import annotations

import enum
import stat
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bootseer.env.subtree import Subtree


class Kind(enum.Enum):
    ADD = "add"  # nothing has that name
    REPLACE = "replace"  # something has, and goes
    REMOVE = "remove"


class Step(NamedTuple):
    """One name in a folder that exists."""

    kind: Kind
    path: bytes  # from the target on


class Plan(NamedTuple):
    steps: list[Step]  # in any order they come to the same; each path once, none below another
    folders: list[int]  # entries of folders that are merged, parents first; the target itself is the first


Look = Callable[[bytes], Mapping[bytes, int]]  # path of a folder -> its names and their st_mode


def plan(below: Subtree, look: Look) -> Plan:
    """`look` is asked once for each folder that is merged."""
    index = below.tree
    children: dict[int, list[int]] = {}
    for entry in range(1, len(index)):
        children.setdefault(index.parents[entry], []).append(entry)
    deleted: dict[bytes, list[bytes]] = {}
    for path in below.deleted:
        above, _, name = path.rpartition(b"/")
        deleted.setdefault(above, []).append(name)
    steps: list[Step] = []
    folders: list[int] = []
    todo: list[tuple[int, bytes]] = [(0, b"")]
    while todo:
        folder, path = todo.pop()
        prefix = path + b"/" if path else b""
        there = look(path)
        folders.append(folder)
        is_opaque = folder in below.opaque  # only of the target itself: another one is replaced
        ours = {index.names[entry] for entry in children.get(folder, ())}
        gone = [name for name in there if name not in ours] if is_opaque else deleted.get(path, [])
        steps += [Step(Kind.REMOVE, prefix + name) for name in sorted(gone) if name in there]
        merged = []
        for entry in children.get(folder, ()):
            name = index.names[entry]
            mode = there.get(name)
            if mode is None:
                steps.append(Step(Kind.ADD, prefix + name))
            elif (
                stat.S_ISDIR(index.modes[entry])
                and stat.S_ISDIR(mode)
                and not is_opaque
                and entry not in below.opaque
            ):
                merged.append((entry, prefix + name))
            else:
                steps.append(Step(Kind.REPLACE, prefix + name))
        todo += reversed(merged)
    return Plan(steps, folders)
