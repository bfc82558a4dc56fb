"""Removes leftovers of killed processes from the directories of compile caches before the next ranks start.

In torch 2.13, `torch.utils.file_baton` waits forever for a file `lock`, even if its maker has ended. Inductor
takes any existing library for a finished one, and an incomplete one ends the rank by SIGBUS.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator

from bootseer.env.compile_cache.collect import is_broken, walk
from bootseer.env.compile_cache.directories import CachePlace, last_use_s, mark_unread
from bootseer.env.compile_cache.kinds import Grouping, is_temporary, unit_of


def tidy(places: Iterable[CachePlace]) -> list[str]:
    """Remove leftovers; only while no rank and no other job runs. Return the removed paths."""
    return [path for place in places for path in _tidy(place)]


def mark_all(places: Iterable[CachePlace]) -> None:
    """Mark all files, so that later reads are detected. Files that cannot be marked count as read."""
    for place in places:
        for path in walk(place.path):
            full = os.path.join(place.path, path)
            try:
                found = os.lstat(full)
                mark_unread(full, found.st_mtime_ns, last_use_s(found.st_atime_ns))
            except OSError:
                continue


def make_room(places: Iterable[CachePlace], limit_bytes: int) -> int:
    """Remove the least recently used units until the rest is within the limit; return the freed bytes.

    Call it only while no rank and no other job runs.
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


def _tidy(place: CachePlace) -> Iterator[str]:
    for above, directories, files in os.walk(place.path):
        for name in [name for name in directories if is_temporary(name)]:
            directories.remove(name)
            path = os.path.join(above, name)
            shutil.rmtree(path, ignore_errors=True)  # does not follow links
            yield path
        for name in files:
            path = os.path.join(above, name)
            if _is_leftover(place, name) or (name.endswith((".so", ".o")) and is_broken(path)):
                try:
                    os.unlink(path)
                except OSError:
                    continue
                yield path


def _is_leftover(place: CachePlace, name: str) -> bool:
    if name == "lock":
        return place.kind.grouping is Grouping.WHOLE_DIRECTORY
    return is_temporary(name) and not name.endswith(".lock") and not name.startswith(".nfs")
