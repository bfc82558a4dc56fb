"""Checks whether a tree may be an environment. Pure.

bootseer.tree.index checks the index of a tree: names, links and extents cannot lead out of it. This module checks
what only environments must not contain: anything but directories "0", "1", ... at the top, devices, pipes and
sockets, programs that run with the rights of another user, and attributes that would change an overlay of the
tree.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping, Sequence
from typing import Protocol

from bootseer.tree.index import OVERLAY_XATTRS

CAPABILITY = b"security.capability"
_OTHERS_RIGHTS = stat.S_ISUID | stat.S_ISGID
_KINDS = {
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


class Entries(Protocol):
    """The part of an index that is checked."""

    @property
    def parents(self) -> Sequence[int]: ...
    @property
    def names(self) -> Sequence[bytes]: ...
    @property
    def modes(self) -> Sequence[int]: ...
    @property
    def rdevs(self) -> Mapping[int, tuple[int, int]]: ...
    @property
    def xattrs(self) -> Mapping[int, Sequence[tuple[bytes, bytes]]]: ...
    def path(self, entry: int, /) -> bytes: ...


def find_tree_fault(index: Entries, targets: int) -> str:
    """Return the first reason why the tree cannot be the environment of `targets` targets, "" if there is none."""
    children = _children_of_root(index)
    tops = [index.names[entry] for entry in children]
    if tops != sorted(b"%d" % number for number in range(targets)):
        shown = ascii(b", ".join(tops[:4]))[1:]
        return f"has {shown} at its top instead of one directory for each of {targets} targets"
    for entry in children:
        if not stat.S_ISDIR(index.modes[entry]):
            return f"{_shown(index, entry)} is not a directory"
    # Environments have many entries, but few different modes, and nearly always none of these.
    odd = {mode for mode in set(index.modes) if stat.S_IFMT(mode) in _KINDS or _is_privileged(mode)}
    if odd:
        for entry, mode in enumerate(index.modes):
            if mode in odd and (reason := _why_odd(index, entry, mode)):
                return f"{_shown(index, entry)} {reason}"
    for entry, pairs in index.xattrs.items():
        for name, _ in pairs:
            if name == CAPABILITY:
                return f"{_shown(index, entry)} has capabilities, which a program of an environment must not have"
            if name.startswith(OVERLAY_XATTRS):
                return f"{_shown(index, entry)} has an attribute of overlays, {ascii(name[:80])[1:]}"
    return ""


def find_target_mismatch(found: Sequence[str], wanted: Sequence[str]) -> str:
    """Return why a snapshot for the directories `found` does not fit a key for `wanted`, "" if they are the same.

    The key decides where set-up may write, and its targets were checked (targets.py). A snapshot only claims it.
    """
    if list(found) == list(wanted):
        return ""
    others = ", ".join(each for each in found if each not in wanted) or "the same in another order"
    return f"is for {others[:200]!a}, but its key is for {', '.join(wanted)[:200]}: the snapshot is not used"


def _children_of_root(index: Entries) -> list[int]:
    """Check all entries: an index may have another order than a builder gives it."""
    return [entry for entry, parent in enumerate(index.parents) if parent == 0 and entry]


def _why_odd(index: Entries, entry: int, mode: int) -> str:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFCHR and index.rdevs.get(entry) == (0, 0):
        return ""  # a whiteout
    if kind in _KINDS:
        return f"is {_KINDS[kind]}, which an environment must not contain"
    return "is setuid or setgid, which a program of an environment must not be"


def _is_privileged(mode: int) -> bool:
    """Ignore directories: there the bits only set the owner of new files."""
    return bool(mode & _OTHERS_RIGHTS) and not stat.S_ISDIR(mode)


def _shown(index: Entries, entry: int) -> str:
    return ascii(index.path(entry)[:200])[1:]
