"""The difference between two walks of a directory. Pure.

To get the new state from the old one: empty the `opaque` directories, remove `deleted`, and add the entries of
`changed`. Every edit sets a file's ctime, which no program can reset. So an edit that keeps size and mtime is
detected too.
"""

from __future__ import annotations

import stat
from typing import NamedTuple

from bootseer.env.capture.walk import Entry, Walk


class Difference(NamedTuple):
    """Paths below a target, b"" for itself; each list sorted."""

    changed: list[bytes]  # new or different, directories too; all entries of an opaque directory
    deleted: list[bytes]  # of a removed directory only itself
    opaque: list[bytes]  # directories that replace another one, or a file: nothing of that shows through


def compare(before: Walk, after: Walk) -> Difference:
    """Compare two walks; see the module's docstring.

    A directory whose names changed has another mtime, so it is in `changed`; its parents need not be.
    """
    changed: list[bytes] = []
    opaque: list[bytes] = []
    new: set[bytes] = set()  # directories without old entries
    for path in sorted(after):
        now, was = after[path], before.get(path)
        if was == now and (not path or _above(path) not in new):
            continue
        is_below_new = path != b"" and _above(path) in new
        is_folder = stat.S_ISDIR(now.mode)
        is_replaced = was is not None and is_folder and _is_replaced(was, now)
        if is_replaced and not is_below_new:
            opaque.append(path)
        if is_folder and (is_below_new or is_replaced or was is None):
            new.add(path)
        if is_below_new or was is None or _differ(was, now):
            changed.append(path)
    deleted = []
    for path in sorted(before):
        if path in after:
            continue
        above = after.get(_above(path)) if path else None
        if not path or (above is not None and stat.S_ISDIR(above.mode) and _above(path) not in new):
            deleted.append(path)
    return Difference(changed, deleted, opaque)


def _is_replaced(was: Entry, now: Entry) -> bool:
    """Return whether a directory was replaced. Overlayfs may renumber an unchanged one, but keeps its ctime."""
    return not stat.S_ISDIR(was.mode) or (was.ino != now.ino and was.ctime_ns != now.ctime_ns)


def _differ(was: Entry, now: Entry) -> bool:
    if (was.mode, was.uid, was.gid, was.size, was.mtime_ns, was.ctime_ns) != (
        now.mode,
        now.uid,
        now.gid,
        now.size,
        now.mtime_ns,
        now.ctime_ns,
    ):
        return True
    return was.target != now.target or (was.ino != now.ino and not stat.S_ISDIR(now.mode))


def _above(path: bytes) -> bytes:
    return path.rpartition(b"/")[0]
