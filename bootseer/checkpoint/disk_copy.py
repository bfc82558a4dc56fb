"""A version's units on this node's disk, from an earlier load: `checkpoints/DIGEST/` in the cache.

    units       a byte a unit, 1 where it is there: written when the unit is
    0, 1, ...   the files, in the version's order; what was not loaded is a hole
    used        locked by whoever has it open: nobody removes it then
    written     locked by who writes it

Only of versions whose units have sums, and what is read here is checked like what is read anywhere: a unit that a
crash has cut off is read from the store.
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
UNITS, USED, WRITTEN = "units", "used", "written"
BLOCK_BYTES = 4096  # what O_DIRECT wants offset, length and address to be multiples of
LEAST_FREE_SHARE = 0.05  # of the disk
HAS = 1

_Move = Callable[[int, Sequence[memoryview], int], int]  # os.preadv, os.pwritev


def can_keep(files: Sequence[StoredFile]) -> bool:
    """PURE: whether every unit has a sum by which it is known to be right."""
    return all(file.sums or not file.layout.size for file in files)


class DiskCopy:
    """Of one version; made by `find` or `make`. Threads may share it."""

    def __init__(self, folder: str, files: Sequence[StoredFile], *, is_writer: bool) -> None:
        """The caller has checked whose folder it is. Raises: OSError."""
        self.folder = folder
        self._files = files
        self._is_writer = is_writer
        self._first: list[int] = []  # of each file, its place among all units
        count = 0
        for file in files:
            self._first.append(count)
            count += file.layout.units
        self._opened: list[int] = []
        self._fds: list[int] = []  # of the files
        self._direct: list[int] = []  # the same around the page cache; -1 where that cannot be
        try:
            self._lock(USED, fcntl.LOCK_SH)
            if is_writer:
                self._lock(WRITTEN, fcntl.LOCK_EX)
            self._units_fd = self._open(UNITS, count)
            for number, file in enumerate(files):
                self._fds.append(self._open(str(number), file.layout.size))
                self._direct.append(self._open_direct(self._fds[-1]))
            self._has = bytearray(os.pread(self._units_fd, count, 0).ljust(count, b"\0"))
            os.utime(self._units_fd)
        except OSError:
            self.close()
            raise

    @classmethod
    def find(cls, cache: str, digest: str, files: Sequence[StoredFile]) -> DiskCopy | None:
        """What there is, for reading; None for nothing that could be used."""
        folder = os.path.join(cache, FOLDER, digest)
        if not os.path.isdir(folder):
            return None
        try:
            _check_own(folder)
            return cls(folder, files, is_writer=False)
        except OSError:
            return None

    @classmethod
    def make(cls, cache: str, digest: str, files: Sequence[StoredFile]) -> DiskCopy:
        """What there is, or a new one, for writing.

        Raises: OSError; BlockingIOError if another process writes it.
        """
        if is_remote(cache):
            raise OSError(f"{cache} is on a network file system")
        folder = os.path.join(cache, FOLDER, digest)
        for each in (os.path.dirname(folder), folder):
            make_private(each)
            _check_own(each)
        return cls(folder, files, is_writer=True)

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
        """Keeps a unit that is right. Raises: OSError."""
        self._mark(file, unit, 0)
        if not self._move(os.pwritev, file, unit * self._files[file].layout.unit_bytes, data):
            raise OSError(errno.EIO, "the disk takes less than it is given", self.folder)
        self._mark(file, unit, HAS)

    def make_room(self, size: int, most_bytes: int) -> None:
        """For so many more bytes, within `most_bytes` for all versions.

        Removes those that nobody uses, the one that was used longest ago first. Raises: OSError for no room.
        """
        own = _taken_bytes(self.folder)
        if own + size > most_bytes:
            raise OSError(f"{own + size:,} bytes of it were to be kept, and {most_bytes:,} may be")
        above = os.path.dirname(self.folder)
        with os.scandir(above) as entries:
            folders = [each.path for each in entries if each.is_dir(follow_symlinks=False)]
        others = sorted((_used_ns(path), path, _promised_bytes(path)) for path in folders if path != self.folder)
        taken = own + sum(bytes_of for _, _, bytes_of in others)
        for _, path, bytes_of in others:
            if taken + size <= most_bytes and is_free(above, size):
                return
            if _remove_unused(path):
                taken -= bytes_of
        if taken + size > most_bytes or not is_free(above, size):
            raise OSError(f"{above} has no room for {size:,} bytes beside what is in use")

    def remove(self) -> None:
        """Nothing of it is worth what it takes."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def close(self) -> None:
        for fd in self._opened:
            os.close(fd)
        self._opened = []

    def _mark(self, file: int, unit: int, value: int) -> None:
        place = self._first[file] + unit
        if self._has[place] != value:
            os.pwrite(self._units_fd, bytes([value]), place)
            self._has[place] = value

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

    def _lock(self, name: str, kind: int) -> None:
        """Until we are closed. Raises: BlockingIOError; OSError when it is being removed."""
        path = os.path.join(self.folder, name)
        fd = _open_lock(path, os.O_CREAT if self._is_writer else 0)
        self._opened.append(fd)
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
        if os.stat(path, follow_symlinks=False).st_ino != os.fstat(fd).st_ino:
            raise OSError(errno.ESTALE, "is being removed", path)

    def _open(self, name: str, size: int) -> int:
        flags = os.O_RDWR | os.O_CREAT if self._is_writer else os.O_RDONLY
        path = os.path.join(self.folder, name)
        fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        self._opened.append(fd)
        if self._is_writer and os.fstat(fd).st_size != size:
            os.ftruncate(fd, size)
        return fd

    def _open_direct(self, fd: int) -> int:
        flags = os.O_RDWR if self._is_writer else os.O_RDONLY
        try:
            direct = os.open(f"/proc/self/fd/{fd}", flags | os.O_CLOEXEC | os.O_DIRECT)
        except OSError:
            return -1  # tmpfs, say
        self._opened.append(direct)
        return direct


def is_kept(cache: str, digest: str) -> bool:
    """Whether a version should be there, whole; if so it counts as used now."""
    path = os.path.join(cache, FOLDER, digest, UNITS)
    try:
        with open(path, "rb") as file:
            units = file.read()
        is_whole = bool(units) and units.count(HAS) == len(units)
        if is_whole:
            os.utime(path)
    except OSError:
        return False
    return is_whole


def is_free(above: str, size: int) -> bool:
    """Whether the disk itself has room for so much, and some more."""
    system = os.statvfs(above)
    return system.f_bavail * system.f_frsize - size >= system.f_blocks * system.f_frsize * LEAST_FREE_SHARE


def _used_ns(folder: str) -> int:
    try:
        return os.stat(os.path.join(folder, UNITS)).st_mtime_ns
    except OSError:
        return 0


def _taken_bytes(folder: str) -> int:
    return sum(found.st_blocks * 512 for found in _stats(folder))


def _promised_bytes(folder: str) -> int:
    """What it takes, or will when who writes it has done so."""
    try:
        fd = _open_lock(os.path.join(folder, WRITTEN), 0)
    except OSError:
        return _taken_bytes(folder)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return sum(found.st_size for found in _stats(folder))
    finally:
        os.close(fd)
    return _taken_bytes(folder)


def _stats(folder: str) -> list[os.stat_result]:
    try:
        with os.scandir(folder) as entries:
            return [entry.stat(follow_symlinks=False) for entry in entries]
    except OSError:
        return []


def _remove_unused(folder: str) -> bool:
    """Whether it is gone."""
    try:
        fd = _open_lock(os.path.join(folder, USED), os.O_CREAT)
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


def _open_lock(path: str, flags: int) -> int:
    return os.open(path, os.O_RDWR | flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


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
