"""Where unpacked trees lie, how large they are, and which go when there is no room; unpacked.py uses them.

What cannot be taken away, for whatever reason, stays: that costs room, and no job.

They have a limit of their own beside that of blocks, as large: BOOTSEER_CACHE_LIMIT. Beyond it, and when the disk
is full, those go that nobody uses, the least recently used first. The one that a job needs now is unpacked in any
case: it cannot run without.
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

from bootseer.blocks import Cache
from bootseer.cache_folder import UNPACKED
from bootseer.errors import StorageError
from bootseer.mounts import unpacked_locks
from bootseer.mounts.unpacked_locks import open_lock
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import BLOCK_BYTES, HOLE, UNIT_BYTES, Index

LOCK = unpacked_locks.LOCK
INDEX, BOOT, COMPLETE, TREE = "index", "boot", "complete", "tree"
GONE = ".gone-"  # folders that were moved aside to be removed
_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnpackedHere(NamedTuple):
    """An unpacked tree of this user."""

    digest: str
    size: int  # bytes on disk
    used_s: float  # when it was used last, since the epoch


def base_of(cache: Cache) -> str:
    """The folder of all of them."""
    return os.path.join(cache.folder, UNPACKED)


def list_unpacked(cache: Cache) -> list[UnpackedHere]:
    """The latest first. Raises: StorageError."""
    base = base_of(cache)
    found = []
    for name in _names(base):
        if _DIGEST.fullmatch(name):
            path = os.path.join(base, name)
            try:
                used_s = os.lstat(path).st_mtime
            except OSError:
                continue  # gone meanwhile
            found.append(UnpackedHere(name, size_below(path), used_s))
    return sorted(found, key=lambda each: -each.used_s)


def make_room(cache: Cache, needed_bytes: int, but: str, say: Callable[[str], object]) -> None:
    """Takes unpacked trees away until one more of this size is within the limit, and fits on the disk.

    Args: but: the digest of the one that is about to be unpacked.
    """
    try:
        _make_room(cache, needed_bytes, but, say)
    except StorageError as error:
        say(f"no room is made for the image: {error}")


def _make_room(cache: Cache, needed_bytes: int, but: str, say: Callable[[str], object]) -> None:
    remove_gone(cache, say)
    there = list_unpacked(cache)
    held_bytes = sum(each.size for each in there)
    needed_bytes -= sum(each.size for each in there if each.digest == but)  # what an interrupted run has left
    limit_bytes = cache.limit_of(held_bytes)
    for each in reversed(there):
        if held_bytes + needed_bytes <= limit_bytes and needed_bytes <= _free_bytes(cache.folder):
            return
        if each.digest != but and _try_remove(cache, each.digest, say):
            held_bytes -= each.size
            limit_bytes = cache.limit_of(held_bytes)
            say(f"an unpacked image that nobody uses was taken away: {each.digest[:16]}, {each.size / 1e9:.1f} GB")
    if held_bytes + needed_bytes > limit_bytes:
        say(
            f"with this image {(held_bytes + needed_bytes) / 1e9:.1f} GB are unpacked in {base_of(cache)}, and the"
            f" limit is {limit_bytes / 1e9:.1f} GB: no other one can go"
        )


def _try_remove(cache: Cache, digest: str, say: Callable[[str], object]) -> bool:
    try:
        return remove_unpacked(cache, digest)
    except StorageError as error:
        say(f"warning: an unpacked image that nobody uses cannot be taken away: {error}")
        return False


def remove_gone(cache: Cache, say: Callable[[str], object]) -> None:
    """What earlier ones have moved aside, and then could not remove. Raises: StorageError."""
    base = base_of(cache)
    for name in _names(base):
        if name.startswith(GONE):
            try:
                remove_files(os.path.join(base, name))
            except OSError as error:
                say(f"warning: {os.path.join(base, name)}: cannot be removed: {error.strerror}")


def size_when_unpacked(index: Index) -> int:
    """About so many bytes on disk: of files, without their holes."""
    total = 0
    for size, runs in zip(index.sizes, index.runs, strict=True):
        pieces = sum(runs[place + 1] for place in range(0, len(runs), 2) if runs[place] != HOLE)
        total += -(-min(size, pieces * BLOCK_BYTES) // UNIT_BYTES) * UNIT_BYTES
    return total


def size_below(folder: str) -> int:
    """Bytes on disk of all that is below a folder; files with several names count once."""
    total = 0
    seen: set[tuple[int, int]] = set()
    for above, folders, names in os.walk(folder):
        for name in (*folders, *names):
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
    """Whether somebody uses an unpacked tree, or is unpacking it, at this moment. Raises: StorageError."""
    with _claimed(os.path.join(base_of(cache), digest)) as is_ours:
        return not is_ours


def remove_unpacked(cache: Cache, digest: str) -> bool:
    """Takes an unpacked tree away; False while somebody uses it, or if there is none. Raises: StorageError.

    It is moved aside first: whoever wants it from then on begins anew, also if files of it cannot be removed.
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


def remove_files(folder: str) -> None:
    """With all that is below it; others may be at it too. Raises: OSError."""
    if os.path.lexists(folder):
        shutil.rmtree(folder, onerror=_open_and_retry)


@contextmanager
def _claimed(place: str) -> Iterator[bool]:
    """Holds a tree alone; gives whether it does."""
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


def _names(folder: str) -> list[str]:
    with map_os_errors(folder):
        try:
            return os.listdir(folder)
        except FileNotFoundError:
            return []


def _free_bytes(folder: str) -> int:
    with map_os_errors(folder):
        system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def _open_and_retry(function: Callable[..., Any], path: str, _info: object) -> None:
    """Folders of an image that this user may not write to are still this user's."""
    with suppress(FileNotFoundError):
        os.chmod(os.path.dirname(path), stat.S_IRWXU)
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, stat.S_IRWXU)
            if function is not os.rmdir:
                shutil.rmtree(path, onerror=_open_and_retry)
                return
        function(path)
