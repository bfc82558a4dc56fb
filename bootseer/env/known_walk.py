"""What a walk of a new folder would find, known without one: it has what the tree says, and nothing else.

Only where nothing was left out or rewritten; some names are looked at all the same, as a file system may keep
times less finely than they are given.
"""

from __future__ import annotations

import os
import stat

from bootseer.env.walk import Entry, Walk
from bootseer.tree.index import Index

SAMPLES = 64


def known_walk(index: Index) -> Walk | None:
    """The walk of a folder that is unpacked from `index`, without inodes; None if it has to be walked."""
    found: Walk = {}
    is_root = os.geteuid() == 0
    uid, gid = os.geteuid(), os.getegid()
    paths = [b""] * len(index)
    for entry, mode in enumerate(index.modes):
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            return None
        if entry:
            above = paths[index.parents[entry]]
            paths[entry] = above + b"/" + index.names[entry] if above else index.names[entry]
        found[paths[entry]] = Entry(
            mode,
            index.uids[entry] if is_root else uid,
            index.gids[entry] if is_root else gid,
            index.sizes[entry] or len(index.targets[entry]),
            index.mtimes_ns[entry],
            0,
            0,
            0,
            0,
            index.targets[entry],
        )
    return found


def is_as_known(found: Walk, folder: str) -> bool:
    """Whether that folder is so, as far as some of its names tell."""
    names = list(found.items())
    return all(
        _is_as_known(os.path.join(os.fsencode(folder), path), entry)
        for path, entry in names[:: max(1, len(names) // SAMPLES)]
    )


def _is_as_known(path: bytes, entry: Entry) -> bool:
    try:
        now = os.lstat(path)
    except OSError:
        return False
    size = 0 if stat.S_ISDIR(now.st_mode) else now.st_size
    facts = (now.st_mode, now.st_uid, now.st_gid, size, now.st_mtime_ns)
    return facts == (entry.mode, entry.uid, entry.gid, entry.size, entry.mtime_ns)
