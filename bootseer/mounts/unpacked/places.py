"""Places of unpacked trees, their sizes, and their eviction when space is short; for tree.py.

A tree that cannot be evicted, for any reason, stays: that costs space, and no job.

They have a limit of their own beside that of blocks, of the same size: BOOTSEER_CACHE_LIMIT. Beyond it, and on a
full disk, unused trees are evicted, the least recently used first. The tree of the current job is unpacked in any
case: the job cannot run without it.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any, NamedTuple

from bootseer.blocks.cache import Cache
from bootseer.cache_folder import UNPACKED
from bootseer.errors import StorageError
from bootseer.logs import get_logger
from bootseer.mounts.unpacked.locks import open_lock
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import BLOCK_BYTES, HOLE, UNIT_BYTES, Index

_log = get_logger(__name__)

INDEX, BOOT, COMPLETE, TREE = "index", "boot", "complete", "tree"
GONE = ".gone-"  # directories that were renamed in order to be removed
_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnpackedInfo(NamedTuple):
    """An unpacked tree of this user."""

    digest: str
    size: int  # bytes on disk
    used_s: float  # time of last use, since the epoch


def base_of(cache: Cache) -> str:
    """Return the directory of all of them."""
    return os.path.join(cache.folder, UNPACKED)


def list_unpacked(cache: Cache) -> list[UnpackedInfo]:
    """List the unpacked trees, the latest first. Raises: StorageError."""
    base = base_of(cache)
    found = []
    for name in _names(base):
        if _DIGEST.fullmatch(name):
            path = os.path.join(base, name)
            try:
                used_s = os.lstat(path).st_mtime
            except OSError:
                continue  # gone meanwhile
            found.append(UnpackedInfo(name, size_below(path), used_s))
    return sorted(found, key=lambda each: -each.used_s)


def free_space(cache: Cache, needed_bytes: int, but: str) -> None:
    """Evict unpacked trees until one more of this size is within the limit, and fits on the disk.

    Args: but: the digest of the one that will be unpacked.
    """
    try:
        _make_room(cache, needed_bytes, but)
    except StorageError as error:
        _log.info("no space can be freed for the image: %s", error)


def _make_room(cache: Cache, needed_bytes: int, but: str) -> None:
    remove_gone(cache)
    there = list_unpacked(cache)
    held_bytes = sum(each.size for each in there)
    needed_bytes -= sum(each.size for each in there if each.digest == but)  # left by an interrupted run
    limit_bytes = cache.limit_of(held_bytes)
    for each in reversed(there):
        if held_bytes + needed_bytes <= limit_bytes and needed_bytes <= _free_bytes(cache.folder):
            return
        if each.digest != but and _try_remove(cache, each.digest):
            held_bytes -= each.size
            limit_bytes = cache.limit_of(held_bytes)
            _log.info("an unused unpacked image was evicted: %s, %.1f GB", each.digest[:16], each.size / 1e9)
    if held_bytes + needed_bytes > limit_bytes:
        _log.info(
            "with this image %.1f GB are unpacked in %s, and the limit is %.1f GB: no other one can be evicted",
            (held_bytes + needed_bytes) / 1e9,
            base_of(cache),
            limit_bytes / 1e9,
        )


def _try_remove(cache: Cache, digest: str) -> bool:
    try:
        return remove_unpacked(cache, digest)
    except StorageError as error:
        _log.warning("an unused unpacked image cannot be evicted: %s", error)
        return False


def remove_gone(cache: Cache) -> None:
    """Remove directories that earlier calls have renamed and could not remove. Raises: StorageError."""
    base = base_of(cache)
    for name in _names(base):
        if name.startswith(GONE):
            try:
                remove_files(os.path.join(base, name))
            except OSError as error:
                _log.warning("%s: cannot be removed: %s", os.path.join(base, name), error.strerror)


def size_when_unpacked(index: Index) -> int:
    """Return about how many bytes on disk the files take, without their holes."""
    total = 0
    for size, runs in zip(index.sizes, index.runs, strict=True):
        pieces = sum(runs[place + 1] for place in range(0, len(runs), 2) if runs[place] != HOLE)
        total += -(-min(size, pieces * BLOCK_BYTES) // UNIT_BYTES) * UNIT_BYTES
    return total


def size_below(directory: str) -> int:
    """Return the bytes on disk of everything below a directory; files with several names count once."""
    total = 0
    seen: set[tuple[int, int]] = set()
    for above, directories, names in os.walk(directory):
        for name in (*directories, *names):
            try:
                found = os.lstat(os.path.join(above, name))
            except OSError:
                continue  # gone meanwhile
            if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                if (found.st_dev, found.st_ino) in seen:
                    continue
                seen.add((found.st_dev, found.st_ino))
            total += found.st_blocks * 512
    return total


def is_used(cache: Cache, digest: str) -> bool:
    """Return whether a process uses or unpacks a tree at this moment. Raises: StorageError."""
    with _claimed(os.path.join(base_of(cache), digest)) as is_ours:
        return not is_ours


def remove_unpacked(cache: Cache, digest: str) -> bool:
    """Evict an unpacked tree; return False while it is in use, or if there is none. Raises: StorageError.

    It is renamed first: later users start over, even if some of its files cannot be removed.
    """
    base = base_of(cache)
    place, aside = os.path.join(base, digest), os.path.join(base, GONE + secrets.token_hex(8))
    with _claimed(place) as is_ours:
        if not is_ours:
            return False
        os.rename(place, aside)
    with map_os_errors(aside):
        remove_files(aside)
    return True


def remove_files(directory: str) -> None:
    """Remove a directory tree; other processes may remove it too. Raises: OSError."""
    if os.path.lexists(directory):
        shutil.rmtree(directory, onerror=_open_and_retry)


@contextmanager
def _claimed(place: str) -> Iterator[bool]:
    """Hold a tree exclusively; yield whether it is held."""
    if not _DIGEST.fullmatch(os.path.basename(place)):
        raise ValueError(f"{os.path.basename(place)[:80]!r} is no digest")
    with map_os_errors(place):
        try:
            lock = open_lock(place)
        except FileNotFoundError:
            yield False
            return
        with closing(lock):
            yield lock.try_hold() and lock.is_there()


def _names(directory: str) -> list[str]:
    with map_os_errors(directory):
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []


def _free_bytes(directory: str) -> int:
    with map_os_errors(directory):
        system = os.statvfs(directory)
    return system.f_bavail * system.f_frsize


def _open_and_retry(function: Callable[..., Any], path: str, _info: object) -> None:
    """Make directories writable and retry: read-only ones of an image are still this user's."""
    with suppress(FileNotFoundError):
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, stat.S_IRWXU)
            if function is not os.rmdir:
                shutil.rmtree(path, onerror=_open_and_retry)
                return
        function(path)
