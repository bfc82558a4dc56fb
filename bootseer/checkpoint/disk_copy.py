"""A version's units on this node's disk, from its last load: `checkpoints/DIGEST/` in the cache (cache_folder.py).

    units       a byte a unit, 1 where it is there: written when the unit is
    0, 1, ...   the files, in the version's order; what was not loaded is a hole
    used        locked by whoever has it open: nobody removes it then
    written     locked by who may write; others read what is there

Only of versions whose units have sums, and what is read here is checked like what is read anywhere: a unit that a
crash has cut off is read from the store. Nothing that goes wrong here is an error; the store has it all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence

from bootseer.cache_folder import make_private
from bootseer.checkpoint.direct import StoredFile
from bootseer.storage.landing import address_of
from bootseer.storage.page_cache import is_remote
from bootseer.trust.owned_files import NotOwnedError, check_owned_folder

FOLDER = "checkpoints"
BLOCK_BYTES = 4096  # what O_DIRECT wants offset, length and address to be multiples of
LEAST_FREE_SHARE = 0.05  # of the disk
HAS = 1

_Move = Callable[[int, Sequence[memoryview], int], int]  # os.preadv, os.pwritev


class DiskCopy:
    """Of one version. Threads may share it."""

    def __init__(self, cache: str, digest: str, files: Sequence[StoredFile], most_bytes: int) -> None:
        """Opens what there is, or a new one, within `most_bytes` for all versions together.

        Raises: OSError.
        """
        self._above = os.path.join(cache, FOLDER)
        self._folder = os.path.join(self._above, digest)
        self._files = files
        self._first: list[int] = []  # of each file, its place among all units
        count = 0
        for file in files:
            self._first.append(count)
            count += file.layout.units
        self._opened: list[int] = []
        self._fds: list[int] = []  # of the files
        self._direct: list[int] = []  # the same around the page cache; -1 where that cannot be
        try:
            if is_remote(cache):
                raise OSError(f"{cache} is on a network file system")
            for folder in (self._above, self._folder):
                make_private(folder)
                _check_own(folder)
            self._lock("used", fcntl.LOCK_SH)
            self.is_writer = self._lock("written", fcntl.LOCK_EX)
            if self.is_writer:
                make_room(self._above, digest, sum(file.layout.size for file in files), most_bytes)
            self._units_fd = self._open("units", count)
            for number, file in enumerate(files):
                self._fds.append(self._open(str(number), file.layout.size))
                self._direct.append(self._open_direct(self._fds[-1]))
            self._has = bytearray(os.pread(self._units_fd, count, 0).ljust(count, b"\0"))
            os.utime(self._units_fd)
        except OSError:
            if not os.path.exists(os.path.join(self._folder, "units")):
                shutil.rmtree(self._folder, ignore_errors=True)  # nothing came of it
            self.close()
            raise

    def has(self, file: int, unit: int) -> bool:
        """Whether it should be there."""
        return self._has[self._first[file] + unit] == HAS

    @property
    def is_whole(self) -> bool:
        """Whether every unit should be there."""
        return self._has.count(HAS) == len(self._has)

    def read(self, file: int, start: int, target: memoryview) -> bool:
        """Fills it with bytes of a file; whether that went well."""
        try:
            return self._move(os.preadv, file, start, target)
        except OSError:
            return False

    def write(self, file: int, unit: int, data: memoryview) -> None:
        """Keeps a unit that is right. Raises: OSError; then nothing more is kept."""
        layout = self._files[file].layout
        try:
            if not self._move(os.pwritev, file, unit * layout.unit_bytes, data):
                raise OSError(f"{self._folder}: the disk took less than it was given")
        except OSError:
            self.is_writer = False
            raise
        self._mark(file, unit, HAS)

    def forget(self, file: int, unit: int) -> None:
        """It is not what it should be."""
        self._mark(file, unit, 0)

    def close(self) -> None:
        for fd in self._opened:
            os.close(fd)
        self._opened = []

    def _mark(self, file: int, unit: int, value: int) -> None:
        place = self._first[file] + unit
        self._has[place] = value
        if self.is_writer:
            os.pwrite(self._units_fd, bytes([value]), place)

    def _move(self, move: _Move, file: int, offset: int, data: memoryview) -> bool:
        """Whether all of it went; what lies in whole blocks goes around the page cache where that can be."""
        done, direct = 0, self._direct[file]
        if direct >= 0 and offset % BLOCK_BYTES == 0 and address_of(data) % BLOCK_BYTES == 0:
            try:
                done = _move_all(move, direct, offset, data[: len(data) // BLOCK_BYTES * BLOCK_BYTES])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self._direct[file] = -1
        return done + _move_all(move, self._fds[file], offset + done, data[done:]) == len(data)

    def _lock(self, name: str, kind: int) -> bool:
        """Whether we have it, until we are closed."""
        fd = _open_lock(os.path.join(self._folder, name))
        self._opened.append(fd)
        try:
            fcntl.flock(fd, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _open(self, name: str, size: int) -> int:
        fd = os.open(
            os.path.join(self._folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600
        )
        self._opened.append(fd)
        if self.is_writer and os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)
        return fd

    def _open_direct(self, fd: int) -> int:
        try:
            direct = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return -1  # tmpfs, say
        self._opened.append(direct)
        return direct


def is_kept(cache: str, digest: str) -> bool:
    """Whether a version should be there, whole."""
    try:
        with open(os.path.join(cache, FOLDER, digest, "units"), "rb") as file:
            units = file.read()
    except OSError:
        return False
    return bool(units) and units.count(HAS) == len(units)


def make_room(above: str, keep: str, size: int, most_bytes: int) -> None:
    """Removes versions that nobody uses, the one that was used longest ago first, until `keep` has room.

    Args: above: the folder of all versions; size: bytes of the one to be kept, when it is whole.
    Raises: OSError where there is none.
    """
    if size > most_bytes:
        raise OSError(f"it has {size:,} bytes, and {most_bytes:,} may be kept")
    others = []
    with os.scandir(above) as entries:
        for entry in entries:
            if entry.name != keep and entry.is_dir(follow_symlinks=False):
                others.append((_used_ns(entry.path), _taken_bytes(entry.path), entry.path))
    taken = sum(each[1] for each in others)
    for _, bytes_of, path in sorted(others):
        if taken + size <= most_bytes and _is_free(above, keep, size):
            return
        if _remove_unused(path):
            taken -= bytes_of
    if taken + size > most_bytes or not _is_free(above, keep, size):
        raise OSError(f"{above} has no room for {size:,} bytes beside what is in use")


def _is_free(above: str, keep: str, size: int) -> bool:
    """Whether the disk itself has room."""
    system = os.statvfs(above)
    left = system.f_bavail * system.f_frsize + _taken_bytes(os.path.join(above, keep)) - size
    return left >= system.f_blocks * system.f_frsize * LEAST_FREE_SHARE


def _used_ns(folder: str) -> int:
    try:
        return os.stat(os.path.join(folder, "units")).st_mtime_ns
    except OSError:
        return 0


def _taken_bytes(folder: str) -> int:
    try:
        with os.scandir(folder) as entries:
            return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries)
    except OSError:
        return 0


def _remove_unused(folder: str) -> bool:
    """Whether it is gone."""
    try:
        fd = _open_lock(os.path.join(folder, "used"))
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _open_lock(path: str) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _check_own(folder: str) -> None:
    """Raises: OSError where others may write to it."""
    try:
        check_owned_folder(folder)
    except NotOwnedError as error:
        raise OSError(str(error)) from error


def _move_all(move: _Move, fd: int, offset: int, data: memoryview) -> int:
    """Bytes that were moved: all, but at the end of a file."""
    done = 0
    while done < len(data):
        count = move(fd, [data[done:]], offset + done)
        if not count:
            break
        done += count
    return done
