"""Where unpacked trees lie, how large they are, and which go when there is no room; unpacked.py uses them.

They have a limit of their own beside that of blocks, as large: BOOTSEER_CACHE_LIMIT. Beyond it, and when the disk
is full, those go that nobody uses, the least recently used first. The one that a job needs now is unpacked in any
case: it cannot run without.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from bootseer.blocks import Cache
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import BLOCK_BYTES, HOLE, UNIT_BYTES, Index

FOLDER = "unpacked"
LOCK, INDEX, BOOT, COMPLETE, TREE = "lock", "index", "boot", "complete", "tree"
OPEN_LOCK = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnpackedHere(NamedTuple):
    """An unpacked tree of this user."""

    digest: str
    size: int  # bytes on disk
    used_s: float  # when it was used last, since the epoch


def base_of(cache: Cache) -> str:
    """The folder of all of them."""
    return os.path.join(cache.folder, FOLDER)


def list_unpacked(cache: Cache) -> list[UnpackedHere]:
    """The latest first."""
    base = base_of(cache)
    found = []
    with suppress(FileNotFoundError), os.scandir(base) as entries:
        for entry in entries:
            if _DIGEST.fullmatch(entry.name):
                used_s = entry.stat(follow_symlinks=False).st_mtime
                found.append(UnpackedHere(entry.name, size_below(entry.path), used_s))
    return sorted(found, key=lambda each: -each.used_s)


def make_room(cache: Cache, needed_bytes: int, but: str, say: Callable[[str], object]) -> None:
    """Takes unpacked trees away until one more of this size is within the limit, and fits on the disk.

    Args: but: the digest of the one that is about to be unpacked.
    Raises: StorageError.
    """
    there = list_unpacked(cache)
    held_bytes = sum(each.size for each in there)
    needed_bytes -= sum(each.size for each in there if each.digest == but)  # what an interrupted run has left
    limit_bytes = cache.limit_of(held_bytes)
    for each in reversed(there):
        if held_bytes + needed_bytes <= limit_bytes and needed_bytes <= _free_bytes(cache.folder):
            return
        if each.digest != but and remove_unpacked(cache, each.digest):
            held_bytes -= each.size
            limit_bytes = cache.limit_of(held_bytes)
            say(f"an unpacked image that nobody uses was taken away: {each.digest[:16]}, {each.size / 1e9:.1f} GB")
    if held_bytes + needed_bytes > limit_bytes:
        say(
            f"with this image {(held_bytes + needed_bytes) / 1e9:.1f} GB are unpacked in {base_of(cache)}, and the"
            f" limit is {limit_bytes / 1e9:.1f} GB: no other one can go"
        )


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
    """Takes an unpacked tree away; False while somebody uses it, or if there is none. Raises: StorageError."""
    place = os.path.join(base_of(cache), digest)
    with _claimed(place) as is_ours:
        if not is_ours:
            return False
        with suppress(FileNotFoundError):
            os.unlink(os.path.join(place, COMPLETE))
        remove_files(os.path.join(place, TREE))
        for name in sorted(os.listdir(place), key=lambda name: name == LOCK):
            os.unlink(os.path.join(place, name))
        os.rmdir(place)
    return True


def is_lock(lock: int, place: str) -> bool:
    """Whether an open file is the lock that is there now."""
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(os.path.join(place, LOCK)))
    except FileNotFoundError:
        return False


def remove_files(folder: str) -> None:
    """With all that is below it. Raises: OSError."""
    if os.path.lexists(folder):
        shutil.rmtree(folder, onerror=_open_and_retry)


@contextmanager
def _claimed(place: str) -> Iterator[bool]:
    """Holds a tree alone; gives whether it does."""
    if not _DIGEST.fullmatch(os.path.basename(place)):
        raise ValueError(f"{os.path.basename(place)[:80]!r} is no digest")
    with map_os_errors(place):
        try:
            lock = os.open(os.path.join(place, LOCK), OPEN_LOCK, 0o600)
        except FileNotFoundError:
            yield False
            return
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield is_lock(lock, place)
        finally:
            os.close(lock)


def _free_bytes(folder: str) -> int:
    with map_os_errors(folder):
        system = os.statvfs(folder)
    return system.f_bavail * system.f_frsize


def _open_and_retry(function: Callable[..., Any], path: str, _info: object) -> None:
    """Folders of an image that this user may not write to are still this user's."""
    parent = os.path.dirname(path)
    os.chmod(parent, stat.S_IRWXU)
    with suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            os.chmod(path, stat.S_IRWXU)
            if function is not os.rmdir:
                shutil.rmtree(path, onerror=_open_and_retry)
                return
        function(path)
