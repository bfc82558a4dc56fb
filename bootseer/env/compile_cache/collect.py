"""Finds the finished files of compile caches: none that a process is writing, or has left incomplete.

In: directories, and known facts of their files. Out: files with their checksums. A file counts if two samples,
`settle_s` apart, show the same size and time of change, if no process holds its lock, and if it appears complete
(kinds.py). No link is followed, no file is loaded.
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

from bootseer.env.capture import contents
from bootseer.env.capture.walk import Entry
from bootseer.env.compile_cache.directories import CachePlace, is_read
from bootseer.env.compile_cache.document import MAX_FILES
from bootseer.env.compile_cache.kinds import (
    MAX_JSON_BYTES,
    Grouping,
    is_built,
    is_complete,
    is_group,
    is_kept,
    is_named_as_credential,
    is_own,
    lock_of,
    to_canonical_group,
    unit_of,
)
from bootseer.env.compile_cache.merge import FoundFile

SETTLE_S = 1.0
_MAX_SAMPLED = 4 * MAX_FILES
_CHUNK_BYTES = 1 << 20
_ENDS_BYTES = 64
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FileSample(NamedTuple):
    size: int
    mtime_ns: int
    ino: int
    atime_ns: int

    def is_as(self, other: FileSample | None) -> bool:
        return other is not None and self[:3] == other[:3]


class FileFacts(NamedTuple):
    """Known facts of a file with this size, time and inode number."""

    size: int
    mtime_ns: int
    ino: int
    sha256: str  # of its canonical bytes; "" if it is incomplete
    kept_bytes: int  # number of canonical bytes
    is_secret: bool = False


class CollectedFiles(NamedTuple):
    """The result of `collect`."""

    found: list[FoundFile]
    left_out: dict[str, int]  # reason -> number of files
    secrets: list[str]  # absolute paths of credentials, which are left out


Sums = MutableMapping[str, FileFacts]  # by absolute path


def collect(
    places: Sequence[CachePlace],
    sums: Sums,
    *,
    settle_s: float = SETTLE_S,
    pause: Callable[[float], object] = time.sleep,
) -> CollectedFiles:
    """Return the finished files of all places. Fill `sums`, so that the next call reads only new files."""
    left_out: Counter[str] = Counter()
    looks = {place: sample(place, left_out) for place in places}
    started_s, now_ns = time.monotonic(), time.time_ns()
    for place, each in looks.items():
        for path, seen in each.items():
            _sum(place, path, seen, sums)
    newest_ns = max((seen.mtime_ns for each in looks.values() for seen in each.values()), default=0)
    # Clocks of file servers may be ahead: a file with a time in the future is not old.
    if newest_ns > now_ns - int(settle_s * 1e9):
        pause(max(0.0, settle_s - (time.monotonic() - started_s)))
    found: list[FoundFile] = []
    for place, each in looks.items():
        found += _finished(place, each, sample(place, Counter()), sums, left_out)
    full = (os.path.join(place.path, path) for place, each in looks.items() for path in each)
    return CollectedFiles(found, dict(left_out), [each for each in full if each in sums and sums[each].is_secret])


def sample(place: CachePlace, left_out: Counter[str]) -> dict[str, FileSample]:
    """Sample the files that may be kept, by their paths in the place."""
    seen: dict[str, FileSample] = {}
    for path in walk(place.path):
        if not is_kept(place.kind, path) or (place.kind.grouping is Grouping.WHOLE_DIRECTORY and "/" not in path):
            continue
        try:
            found = os.lstat(os.path.join(place.path, path))
        except OSError:
            continue  # removed meanwhile
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            left_out["no files of this user's"] += 1
        elif len(seen) >= _MAX_SAMPLED:
            left_out["too many files"] += 1
        else:
            seen[path] = FileSample(found.st_size, found.st_mtime_ns, found.st_ino, found.st_atime_ns)
    return seen


def walk(directory: str) -> Iterator[str]:
    """Yield the relative paths of all files. Links are not followed; unreadable directories are skipped."""
    for above, _, names in os.walk(directory):
        below = os.path.relpath(above, directory)
        for name in names:
            yield name if below == "." else f"{below}/{name}"


def path_prefix(place: CachePlace) -> str:
    """Return the prefix of a place's paths in a generation; a bound kind has one for each path of the place."""
    if not place.kind.is_bound:
        return f"{place.kind.name}/"
    return f"{place.kind.name}/{hashlib.sha256(os.fsencode(place.path)).hexdigest()[:16]}/"


def is_broken(path: str) -> bool:
    """Return whether a linker has left an object incomplete. For files that no process is writing."""
    try:
        with open(path, "rb", buffering=0) as file:
            head = file.read(_ENDS_BYTES)
            return not is_complete(path, os.fstat(file.fileno()).st_size, head, None, b"")
    except OSError:
        return False


def read_canonical(source: str, path: str) -> bytes:
    """Read the canonical bytes of a small file that depends on its path. Raises: OSError."""
    data = _read(source, MAX_JSON_BYTES)
    return (to_canonical_group(data) or b"") if is_group(path) else data


def open_without_atime(path: str) -> int:
    """Open a file without changing its time of access, where that is possible. Raises: OSError."""
    try:
        return os.open(path, _OPEN | os.O_NOATIME)
    except PermissionError:
        return os.open(path, _OPEN)


# ---- one place ---------------------------------------------------------------------------------------------


def _finished(
    place: CachePlace,
    first: dict[str, FileSample],
    second: dict[str, FileSample],
    sums: Sums,
    left_out: Counter[str],
) -> list[FoundFile]:
    finished: dict[str, FileFacts] = {}
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
        # A unit is used if one of its files is: of an object only the library is read.
        is_used = any(is_read(first[path].atime_ns) for path in paths)
        found += [
            FoundFile(
                path_prefix(place) + path,
                finished[path].kept_bytes,
                finished[path].mtime_ns,
                finished[path].sha256,
                is_used,
                os.path.join(place.path, path),
            )
            for path in sorted(paths)
        ]
    return found


def _is_whole_unit(place: CachePlace, unit: str, paths: Sequence[str], finished: dict[str, FileFacts]) -> bool:
    if not all(path in finished for path in paths):
        return False
    if place.kind.grouping is not Grouping.WHOLE_DIRECTORY:
        return True
    if os.path.lexists(os.path.join(place.path, unit, "lock")):
        return False
    return is_built({path.partition("/")[2]: finished[path].mtime_ns for path in paths})


def is_locked(place: CachePlace, path: str) -> bool:
    """Return whether a compiler is writing a file."""
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


def _sum(place: CachePlace, path: str, seen: FileSample, sums: Sums) -> None:
    full = os.path.join(place.path, path)
    known = sums.get(full)
    if known is not None and known[:3] == seen[:3]:
        return
    sums.pop(full, None)
    try:
        if is_own(place.kind) and _is_secret(full, path, seen.size):
            sums[full] = FileFacts(seen.size, seen.mtime_ns, seen.ino, "", 0, is_secret=True)
            return
        digest, kept_bytes = _digest(full, path, seen.size)
    except OSError:
        return  # removed, or not readable
    sums[full] = FileFacts(seen.size, seen.mtime_ns, seen.ino, digest, kept_bytes)


def _is_secret(full: str, path: str, size: int) -> bool:
    """Return whether a file is a credential, which every reader of the store could read."""
    if is_named_as_credential(path) and size <= contents.MAX_SECRET_BYTES:
        return True
    where = os.fsencode(full)
    if not contents.may_hold_secret(where, Entry(stat.S_IFREG, 0, 0, size, 0, 0, 0, 0, 1, b"")):
        return False
    return contents.holds_secret(where, _read(full, contents.MAX_SECRET_BYTES))


def _digest(full: str, path: str, size: int) -> tuple[str, int]:
    """Return checksum and length of the canonical bytes of a file; the checksum is "" if it is incomplete."""
    if is_group(path):
        data = read_canonical(full, path)
        return (hashlib.sha256(data).hexdigest(), len(data)) if data else ("", 0)
    is_text = path.endswith(".json") and size <= MAX_JSON_BYTES
    digest, head, tail, text = hashlib.sha256(), b"", b"", bytearray()
    total = 0
    fd = open_without_atime(full)
    try:
        while chunk := os.read(fd, _CHUNK_BYTES):
            digest.update(chunk)
            head = head or chunk[:_ENDS_BYTES]
            tail = (tail + chunk)[-_ENDS_BYTES:]
            total += len(chunk)
            if is_text:
                text += chunk
            if total > size:
                break  # it grows: the second sample shows it
    finally:
        os.close(fd)
    is_whole = is_complete(path, total, head, bytes(text) if is_text else None, tail)
    return (digest.hexdigest() if is_whole else ""), total


def _read(path: str, max_bytes: int) -> bytes:
    fd = open_without_atime(path)
    try:
        data = bytearray()
        while len(data) <= max_bytes and (chunk := os.read(fd, _CHUNK_BYTES)):
            data += chunk
        return bytes(data[: max_bytes + 1])
    finally:
        os.close(fd)
