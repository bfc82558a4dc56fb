"""Finds the finished files of first-step caches: nothing that somebody writes, or stopped writing in the middle.

In: folders, and what is known of their files. Out: files with their sums. A file counts when two looks, `settle_s`
apart, show the same size and time of change, when nobody has its lock, and when it looks whole (caches_kinds).
Nothing is followed, nothing is loaded.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import NamedTuple

from bootseer.env import contents
from bootseer.env.caches_document import MOST_FILES
from bootseer.env.caches_folders import Place, is_read
from bootseer.env.caches_kinds import (
    MOST_JSON_BYTES,
    Grouping,
    is_built,
    is_group,
    is_named_as_credential,
    is_own,
    is_taken,
    lock_of,
    looks_whole,
    unit_of,
    without_folder,
)
from bootseer.env.caches_merge import Found
from bootseer.env.walk import Entry

SETTLE_S = 1.0
_MOST_LOOKED_AT = 4 * MOST_FILES
_CHUNK_BYTES = 1 << 20
_ENDS_BYTES = 64
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Seen(NamedTuple):
    """A file as a look shows it."""

    size: int
    mtime_ns: int
    ino: int
    atime_ns: int

    def is_as(self, other: Seen | None) -> bool:
        return other is not None and self[:3] == other[:3]


class Sum(NamedTuple):
    """What is known of a file with this size, time and number."""

    size: int
    mtime_ns: int
    ino: int
    sha256: str  # of its canonical bytes; "" of what is not whole
    kept_bytes: int  # of these
    is_secret: bool = False


class Collected(NamedTuple):
    """What there is."""

    found: list[Found]
    left_out: dict[str, int]  # why, and how many files
    secrets: list[str]  # absolute paths of credentials, which are left out


Sums = MutableMapping[str, Sum]  # by absolute path


def collect(
    places: Sequence[Place],
    sums: Sums,
    *,
    settle_s: float = SETTLE_S,
    pause: Callable[[float], object] = time.sleep,
) -> Collected:
    """The finished files of all places. `sums` is filled, so that the next call reads only what is new."""
    left_out: Counter[str] = Counter()
    looks = {place: look(place, left_out) for place in places}
    started_s, now_ns = time.monotonic(), time.time_ns()
    for place, each in looks.items():
        for path, seen in each.items():
            _sum(place, path, seen, sums)
    newest_ns = max((seen.mtime_ns for each in looks.values() for seen in each.values()), default=0)
    # Clocks of file servers may go ahead: what seems to come from the future is not old.
    if newest_ns > now_ns - int(settle_s * 1e9):
        pause(max(0.0, settle_s - (time.monotonic() - started_s)))
    found: list[Found] = []
    for place, each in looks.items():
        found += _finished(place, each, look(place, Counter()), sums, left_out)
    full = (os.path.join(place.path, path) for place, each in looks.items() for path in each)
    return Collected(found, dict(left_out), [each for each in full if each in sums and sums[each].is_secret])


def look(place: Place, left_out: Counter[str]) -> dict[str, Seen]:
    """The files that may be kept, by their paths in the place."""
    seen: dict[str, Seen] = {}
    for path in walk(place.path):
        if not is_taken(place.kind, path) or (place.kind.grouping is Grouping.WHOLE_FOLDER and "/" not in path):
            continue
        try:
            found = os.lstat(os.path.join(place.path, path))
        except OSError:
            continue  # gone again
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            left_out["no files of this user's"] += 1
        elif len(seen) >= _MOST_LOOKED_AT:
            left_out["too many files"] += 1
        else:
            seen[path] = Seen(found.st_size, found.st_mtime_ns, found.st_ino, found.st_atime_ns)
    return seen


def walk(folder: str) -> Iterator[str]:
    """Paths of what is no folder, from `folder` on. Links are not followed; what cannot be read is passed over."""
    for above, _, names in os.walk(folder):
        below = os.path.relpath(above, folder)
        for name in names:
            yield name if below == "." else f"{below}/{name}"


def prefix(place: Place) -> str:
    """What paths of a generation begin with. What is bound to its path is found only by who has the same."""
    if not place.kind.is_bound:
        return f"{place.kind.name}/"
    return f"{place.kind.name}/{hashlib.sha256(os.fsencode(place.path)).hexdigest()[:16]}/"


def is_broken(path: str) -> bool:
    """Whether the linker that wrote an object stopped in the middle. For files that nobody writes now."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(_ENDS_BYTES)
            return not looks_whole(path, os.fstat(file.fileno()).st_size, head, None, b"")
    except OSError:
        return False


def read_kept(source: str, path: str) -> bytes:
    """What is kept of a small file whose bytes depend on where it is. Raises: OSError."""
    data = _read(source, MOST_JSON_BYTES)
    return (without_folder(data) or b"") if is_group(path) else data


def open_quietly(path: str) -> int:
    """Opened so that nobody takes it for read by a start, where that is possible. Raises: OSError."""
    try:
        return os.open(path, _OPEN | os.O_NOATIME)
    except PermissionError:
        return os.open(path, _OPEN)


# ---- one place ---------------------------------------------------------------------------------------------


def _finished(
    place: Place, first: dict[str, Seen], second: dict[str, Seen], sums: Sums, left_out: Counter[str]
) -> list[Found]:
    finished: dict[str, Sum] = {}
    for path, seen in first.items():
        known = sums.get(os.path.join(place.path, path))
        if known is None or not seen.is_as(second.get(path)) or known[:3] != seen[:3]:
            left_out["being written"] += 1
        elif known.is_secret:
            left_out["credentials"] += 1
        elif not known.sha256:
            left_out["not written to the end"] += 1
        elif is_locked(place, path):
            left_out["being written"] += 1
        else:
            finished[path] = known
    units: dict[str, list[str]] = {}
    for path in second if place.kind.is_whole else finished:
        units.setdefault(unit_of(place.kind, path), []).append(path)
    found = []
    for unit, paths in units.items():
        if place.kind.is_whole and not _is_whole_unit(place, unit, paths, finished):
            left_out["not built to the end"] += sum(1 for path in paths if path in finished)
            continue
        # What belongs together is used together: of an object only its library is read.
        is_used = any(is_read(first[path].atime_ns) for path in paths)
        found += [
            Found(
                prefix(place) + path,
                finished[path].kept_bytes,
                finished[path].mtime_ns,
                finished[path].sha256,
                is_used,
                os.path.join(place.path, path),
            )
            for path in sorted(paths)
        ]
    return found


def _is_whole_unit(place: Place, unit: str, paths: Sequence[str], finished: dict[str, Sum]) -> bool:
    if not all(path in finished for path in paths):
        return False
    if place.kind.grouping is not Grouping.WHOLE_FOLDER:
        return True
    if os.path.lexists(os.path.join(place.path, unit, "lock")):
        return False
    return is_built({path.partition("/")[2]: finished[path].mtime_ns for path in paths})


def is_locked(place: Place, path: str) -> bool:
    """Whether a compiler is at work on a file."""
    name = lock_of(place.kind, path)
    if not name:
        return False
    try:
        fd = os.open(os.path.join(place.path, name), _OPEN)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    finally:
        os.close(fd)
    return False


def _sum(place: Place, path: str, seen: Seen, sums: Sums) -> None:
    full = os.path.join(place.path, path)
    known = sums.get(full)
    if known is not None and known[:3] == seen[:3]:
        return
    sums.pop(full, None)
    try:
        if is_own(place.kind) and _is_secret(full, path, seen.size):
            sums[full] = Sum(seen.size, seen.mtime_ns, seen.ino, "", 0, is_secret=True)
            return
        digest, kept_bytes = _digest(full, path, seen.size)
    except OSError:
        return  # gone, or not to be read
    sums[full] = Sum(seen.size, seen.mtime_ns, seen.ino, digest, kept_bytes)


def _is_secret(full: str, path: str, size: int) -> bool:
    """Whether it is a credential: in the store it would be for everybody who reads that."""
    if is_named_as_credential(path) and size <= contents.MOST_SECRET_BYTES:
        return True
    where = os.fsencode(full)
    if not contents.may_hold_secret(where, Entry(stat.S_IFREG, 0, 0, size, 0, 0, 0, 0, 1, b"")):
        return False
    return contents.holds_secret(where, _read(full, contents.MOST_SECRET_BYTES))


def _digest(full: str, path: str, size: int) -> tuple[str, int]:
    """The sum of what is kept of a file, "" of what is not whole, and its length."""
    if is_group(path):
        data = read_kept(full, path)
        return (hashlib.sha256(data).hexdigest(), len(data)) if data else ("", 0)
    is_text = path.endswith(".json") and size <= MOST_JSON_BYTES
    digest, head, tail, text = hashlib.sha256(), b"", b"", bytearray()
    total = 0
    fd = open_quietly(full)
    try:
        while chunk := os.read(fd, _CHUNK_BYTES):
            digest.update(chunk)
            head = head or chunk[:_ENDS_BYTES]
            tail = (tail + chunk)[-_ENDS_BYTES:]
            total += len(chunk)
            if is_text:
                text += chunk
            if total > size:
                break  # it grows: the second look will tell
    finally:
        os.close(fd)
    is_whole = looks_whole(path, total, head, bytes(text) if is_text else None, tail)
    return (digest.hexdigest() if is_whole else ""), total


def _read(path: str, most_bytes: int) -> bytes:
    fd = open_quietly(path)
    try:
        data = bytearray()
        while len(data) <= most_bytes and (chunk := os.read(fd, _CHUNK_BYTES)):
            data += chunk
        return bytes(data[: most_bytes + 1])
    finally:
        os.close(fd)
