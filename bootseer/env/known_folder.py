"""What a walk of a new folder would find, known without one: it has what the tree says, and nothing else.

Only where nothing was left out or rewritten; some names are looked at all the same, as a file system may keep
times less finely than they are given.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import itemgetter

from bootseer.env.markers import Row, digest_of_rows
from bootseer.tree.index import Index

SAMPLES = 64
_KINDS = frozenset({stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK})


class KnownFolder:
    """A folder that was unpacked from a tree. `sha256`: as `digest_of` a walk of it."""

    def __init__(self, rows: list[Row]) -> None:
        """`rows`: sorted by path."""
        self._rows = rows
        self.sha256 = digest_of_rows(rows)

    def is_as_known(self, folder: str) -> bool:
        """Whether that folder is so, as far as some of its names tell."""
        above = os.fsencode(folder)
        return all(_is_so(above, row) for row in self._rows[:: max(1, len(self._rows) // SAMPLES)])


def known_folder(index: Index, paths: Sequence[bytes]) -> KnownFolder | None:
    """A folder that is unpacked from `index`; None if it has to be walked.

    Args: paths: of its entries, in their order, and after them those of names that are not there.
    """
    if not {stat.S_IFMT(mode) for mode in set(index.modes)} <= _KINDS:
        return None
    uids: Iterable[int] = index.uids
    gids: Iterable[int] = index.gids
    if os.geteuid():
        uids, gids = repeat(os.geteuid()), repeat(os.getegid())
    folders = {mode for mode in set(index.modes) if stat.S_ISDIR(mode)}
    rows: list[Row] = [
        (path, mode, uid, gid)
        if mode in folders
        else (path, mode, uid, gid, size or len(target), mtime_ns, target)
        for path, mode, uid, gid, size, mtime_ns, target in zip(
            paths, index.modes, uids, gids, index.sizes, index.mtimes_ns, index.targets, strict=False
        )
    ]
    if len(paths) > len(index):
        there = set(paths[: len(index)])
        rows += [(path,) for path in set(paths[len(index) :]) - there]
    rows.sort(key=itemgetter(0))
    return KnownFolder(rows)


def _is_so(above: bytes, row: Row) -> bool:
    path = os.path.join(above, row[0]) if row[0] else above
    try:
        now = os.lstat(path)
    except FileNotFoundError:
        return len(row) == 1
    except OSError:
        return False
    if stat.S_ISDIR(now.st_mode):
        return row[1:] == (now.st_mode, now.st_uid, now.st_gid)
    return row[1:6] == (now.st_mode, now.st_uid, now.st_gid, now.st_size, now.st_mtime_ns)
