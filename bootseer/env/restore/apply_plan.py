"""PURE: the plan to move an unpacked difference into an existing directory with as few renames as possible.

In: the difference (subtree.py), and the entries of the directories that both have. Out: steps, each of which is
one rename, and the directories that both have, whose attributes are set at the end. A whole new directory of any
size is one step.

Source: as overlayfs merges an upper directory into a lower one (Documentation/filesystems/overlayfs.rst).
"""

from __future__ import annotations

import enum
import stat
from collections.abc import Callable, Mapping
from typing import NamedTuple

from bootseer.env.capture.subtree import Subtree


class StepKind(enum.Enum):
    ADD = "add"  # the name is free
    REPLACE = "replace"  # the name is taken by the old entry
    REMOVE = "remove"


class Step(NamedTuple):
    """The change of one name in an existing directory."""

    kind: StepKind
    path: bytes  # relative to the target


class Plan(NamedTuple):
    steps: list[Step]  # the order does not matter; each path once, none below another
    folders: list[int]  # entries of directories that are merged, parents first; the target itself is the first


Look = Callable[[bytes], Mapping[bytes, int]]  # path of a directory -> its names and their st_mode


def plan(below: Subtree, look: Look) -> Plan:
    """Return the plan; call `look` once for each directory that is merged."""
    index = below.tree
    children: dict[int, list[int]] = {}
    for entry in range(1, len(index)):
        children.setdefault(index.parents[entry], []).append(entry)
    deleted: dict[bytes, list[bytes]] = {}
    for path in below.deleted:
        above, _, name = path.rpartition(b"/")
        deleted.setdefault(above, []).append(name)
    steps: list[Step] = []
    directories: list[int] = []
    todo: list[tuple[int, bytes]] = [(0, b"")]
    while todo:
        directory, path = todo.pop()
        prefix = path + b"/" if path else b""
        there = look(path)
        directories.append(directory)
        is_opaque = directory in below.opaque  # only the target itself: other opaque ones are replaced
        ours = {index.names[entry] for entry in children.get(directory, ())}
        gone = [name for name in there if name not in ours] if is_opaque else deleted.get(path, [])
        steps += [Step(StepKind.REMOVE, prefix + name) for name in sorted(gone) if name in there]
        merged = []
        for entry in children.get(directory, ()):
            name = index.names[entry]
            mode = there.get(name)
            if mode is None:
                steps.append(Step(StepKind.ADD, prefix + name))
            elif (
                stat.S_ISDIR(index.modes[entry])
                and stat.S_ISDIR(mode)
                and not is_opaque
                and entry not in below.opaque
            ):
                merged.append((entry, prefix + name))
            else:
                steps.append(Step(StepKind.REPLACE, prefix + name))
        todo += reversed(merged)
    return Plan(steps, directories)
