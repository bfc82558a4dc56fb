"""Which trees may be environments. Pure.

The index of a tree is checked by bootseer.tree.index: names, links and extents cannot lead out of it. Here is what
only environments may not have: anything but folders "0", "1", ... at the top, devices, pipes and sockets, programs
that run with another's rights, and what would change how an overlay of it looks.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

from bootseer.tree.index import OVERLAY_XATTRS, Index

CAPABILITY = b"security.capability"
_OTHERS_RIGHTS = stat.S_ISUID | stat.S_ISGID
_KINDS = {
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a device",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}


def why_no_environment(index: Index, targets: int) -> str:
    """Why the tree cannot be the environment of so many targets: the first reason found, "" if there is none."""
    tops = [index.names[entry] for entry in _children_of_root(index)]
    if tops != sorted(b"%d" % number for number in range(targets)):
        shown = ascii(b", ".join(tops[:4]))[1:]
        return f"has {shown} at its top instead of one folder for each of {targets} targets"
    for entry in _children_of_root(index):
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


def _children_of_root(index: Index) -> Iterator[int]:
    """They come first: parents before children, and those of a folder together."""
    return (entry for entry, parent in enumerate(index.parents) if parent == 0 and entry)


def _why_odd(index: Index, entry: int, mode: int) -> str:
    kind = stat.S_IFMT(mode)
    if kind == stat.S_IFCHR and index.rdevs.get(entry) == (0, 0):
        return ""  # a whiteout
    if kind in _KINDS:
        return f"is {_KINDS[kind]}, which no environment may have"
    return "is setuid or setgid, which no program of an environment may be"


def _is_privileged(mode: int) -> bool:
    """Of folders the bits only say whose new files are."""
    return bool(mode & _OTHERS_RIGHTS) and not stat.S_ISDIR(mode)


def _shown(index: Index, entry: int) -> str:
    return ascii(index.path(entry)[:200])[1:]
