"""Which trees may be environments. Pure.

The index of a tree is checked by bootseer.tree.index: names, links and extents cannot lead out of it. Here is what
only environments may not have: anything but folders "0", "1", ... at the top, devices, pipes and sockets, programs
that run with another's rights, and what would change how an overlay of it looks.
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
    """What counts of an index."""

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


def why_no_environment(index: Entries, targets: int) -> str:
    """Why the tree cannot be the environment of so many targets: the first reason found, "" if there is none."""
    children = _children_of_root(index)
    tops = [index.names[entry] for entry in children]
    if tops != sorted(b"%d" % number for number in range(targets)):
        shown = ascii(b", ".join(tops[:4]))[1:]
        return f"has {shown} at its top instead of one folder for each of {targets} targets"
    for entry in children:
        if not stat.S_ISDIR(index.modes[entry]):
            return f"{_shown(index, entry)} is no folder"
    # There are few different modes, and nearly always none of these: environments have many entries.
    odd = {mode for mode in set(index.modes) if stat.S_IFMT(mode) in _KINDS or _is_privileged(mode)}
    if odd:
        for entry, mode in enumerate(index.modes):
            if mode in odd and (reason := _why_odd(index, entry, mode)):
                return f"{_shown(index, entry)} {reason}"
    for entry, pairs in index.xattrs.items():
        for name, _ in pairs:
            if name == CAPABILITY:
                return f"{_shown(index, entry)} has capabilities, which no environment may give a program"
            if name.startswith(OVERLAY_XATTRS):
                return f"{_shown(index, entry)} has an attribute of overlays, {ascii(name[:80])[1:]}"
    return ""


def why_other_targets(found: Sequence[str], wanted: Sequence[str]) -> str:
    """Why a snapshot that is for the folders `found` is none of a key for `wanted`; "" if they are the same.

    The key says where set-up may write, and was checked (targets.py); a snapshot only says so.
    """
    if list(found) == list(wanted):
        return ""
    others = ", ".join(each for each in found if each not in wanted) or "the same in another order"
    return f"is for {others[:200]!a}, and its key for {', '.join(wanted)[:200]}: it is not used"


def _children_of_root(index: Entries) -> list[int]:
    """All entries are looked at: an index may have them in another order than a builder gives them."""
    return [entry for entry, parent in enumerate(index.parents) if parent == 0 and entry]


def _why_odd(index: Entries, entry: int, mode: int) -> str:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFCHR and index.rdevs.get(entry) == (0, 0):
        return ""  # a whiteout
    if kind in _KINDS:
        return f"is {_KINDS[kind]}, which no environment may have"
    return "is setuid or setgid, which no program of an environment may be"


def _is_privileged(mode: int) -> bool:
    """Of folders the bits only say whose new files are."""
    return bool(mode & _OTHERS_RIGHTS) and not stat.S_ISDIR(mode)


def _shown(index: Entries, entry: int) -> str:
    return ascii(index.path(entry)[:200])[1:]
