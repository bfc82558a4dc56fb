"""What killed processes leave in the folders of first-step caches, taken away before the next ranks start.

Read in torch 2.13: `torch.utils.file_baton` waits for a file `lock` for ever, whoever made it; inductor takes a
library that is there for a finished one, and a half of it ends the rank by SIGBUS.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator

from bootseer.env.caches_collect import is_broken, walk
from bootseer.env.caches_folders import Place, last_use_s, mark
from bootseer.env.caches_kinds import Grouping, is_temporary, unit_of


def tidy(places: Iterable[Place]) -> list[str]:
    """Takes it away; only where no rank and no other job is at work. Gives the paths that went."""
    return [path for place in places for path in _tidy(place)]


def mark_all(places: Iterable[Place]) -> None:
    """From now on it shows which files are read. What cannot be marked counts as read."""
    for place in places:
        for path in walk(place.path):
            full = os.path.join(place.path, path)
            try:
                found = os.lstat(full)
                mark(full, found.st_mtime_ns, last_use_s(found.st_atime_ns))
            except OSError:
                continue


def make_room(places: Iterable[Place], limit_bytes: int) -> int:
    """Takes away what was not of use for the longest time until the rest is within the limit; gives the bytes.

    Where no rank and no other job is at work.
    """
    units: dict[tuple[str, str], list[tuple[str, os.stat_result]]] = {}
    total = 0
    for place in places:
        for path in walk(place.path):
            full = os.path.join(place.path, path)
            try:
                found = os.lstat(full)
            except OSError:
                continue
            units.setdefault((place.path, unit_of(place.kind, path)), []).append((full, found))
            total += found.st_size
    freed = 0
    for files in sorted(units.values(), key=lambda unit: max(last_use_s(each.st_atime_ns) for _, each in unit)):
        if total - freed <= limit_bytes:
            break
        for full, found in files:
            try:
                os.unlink(full)
            except OSError:
                continue
            freed += found.st_size
    return freed


def _tidy(place: Place) -> Iterator[str]:
    for above, folders, files in os.walk(place.path):
        for name in [name for name in folders if is_temporary(name)]:
            folders.remove(name)
            path = os.path.join(above, name)
            shutil.rmtree(path, ignore_errors=True)  # takes no link for a folder
            yield path
        for name in files:
            path = os.path.join(above, name)
            if _is_left(place, name) or (name.endswith((".so", ".o")) and is_broken(path)):
                try:
                    os.unlink(path)
                except OSError:
                    continue
                yield path


def _is_left(place: Place, name: str) -> bool:
    if name == "lock":
        return place.kind.grouping is Grouping.WHOLE_FOLDER
    return is_temporary(name) and not name.endswith(".lock") and not name.startswith(".nfs")
