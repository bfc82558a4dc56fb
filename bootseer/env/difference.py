"""What changed between two walks of a folder. Pure.

Laid over what was there before, the entries named by `changed`, with `deleted` taken away and `opaque` folders
emptied first, give what was there after. Every edit sets a file's ctime, which nobody can put back: also one that
keeps size and mtime is seen.
"""

from __future__ import annotations

import stat
from typing import NamedTuple

from bootseer.env.walk import Entry, Walk


class Difference(NamedTuple):
    """Paths below a target, b"" for itself; each list sorted."""

    changed: list[bytes]  # new or different, folders too; everything in a folder that is opaque
    deleted: list[bytes]  # of a folder that is gone only itself
    opaque: list[bytes]  # folders that took the place of another one, or of a file: nothing of that shows through

    @property
    def is_empty(self) -> bool:
        return not (self.changed or self.deleted)


def compare(before: Walk, after: Walk) -> Difference:
    """See the module's docstring.

    A folder whose names changed has another mtime, so it is among the changed ones; one above it need not be.
    """
    changed: list[bytes] = []
    opaque: list[bytes] = []
    new: set[bytes] = set()  # folders of which nothing was there before under these paths
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
    """Whether a folder is another one. Overlayfs may number one anew that nobody touched; its ctime stays."""
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
