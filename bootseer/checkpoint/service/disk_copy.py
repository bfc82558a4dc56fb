"""A version's units on this node's disk, from an earlier load: `checkpoints/DIGEST/` in the cache.

    units       a byte per unit, 1 if it is present: written after the unit
    0, 1, ...   the files, in the version's order; parts that were not loaded are holes
    used        locked by each process that has it open, which prevents its removal
    written     locked by its writer

Only versions whose units have checksums are kept, and units read here are verified like all others: a unit that a
crash has cut off is read from the store.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Sequence

from bootseer.cache_folder import make_private_dir
from bootseer.checkpoint.io.direct import StoredFile
from bootseer.linux.page_cache import is_remote
from bootseer.storage.engine.revocable_buffer import address_of
from bootseer.trust.owned_files import NotOwnedError, check_owned_directory

DIRECTORY = "checkpoints"
UNITS, USED, WRITTEN = "units", "used", "written"
BLOCK_BYTES = 4096  # O_DIRECT requires multiples of it as offset, length and address
MIN_FREE_SHARE = 0.05  # of the disk
HAS = 1

_Move = Callable[[int, Sequence[memoryview], int], int]  # os.preadv, os.pwritev


def can_keep(files: Sequence[StoredFile]) -> bool:
    """PURE: return whether every unit has a checksum to verify it with."""
    return all(file.sums or not file.layout.size for file in files)


class DiskCopy:
    """The copy of one version; made by `find` or `make`. Threads may share it."""

    def __init__(self, folder: str, files: Sequence[StoredFile], *, is_writer: bool) -> None:
        """Open it; the caller has checked the directory's owner. Raises: OSError."""
        self.folder = folder
        self._files = files
        self._is_writer = is_writer
        self._first: list[int] = []  # of each file, its index among all units
        count = 0
        for file in files:
            self._first.append(count)
            count += file.layout.units
        self._opened: list[int] = []
        self._fds: list[int] = []  # of the files
        self._direct: list[int] = []  # the same, bypassing the page cache; -1 if impossible
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
        """Open an existing copy for reading; None if there is none that can be used."""
        directory = os.path.join(cache, DIRECTORY, digest)
        if not os.path.isdir(directory):
            return None
        try:
            _check_own(directory)
            return cls(directory, files, is_writer=False)
        except OSError:
            return None

    @classmethod
    def make(cls, cache: str, digest: str, files: Sequence[StoredFile]) -> DiskCopy:
        """Open or create a copy for writing.

        Raises: OSError; BlockingIOError if another process writes it.
        """
        if is_remote(cache):
            raise OSError(f"{cache} is on a network file system")
        directory = os.path.join(cache, DIRECTORY, digest)
        for each in (os.path.dirname(directory), directory):
            make_private_dir(each)
            _check_own(each)
        return cls(directory, files, is_writer=True)

    def has(self, file: int, unit: int) -> bool:
        """Return whether a unit should be present."""
        return self._has[self._first[file] + unit] == HAS

    @property
    def is_whole(self) -> bool:
        """Whether every unit should be present."""
        return self._has.count(HAS) == len(self._has)

    def read(self, file: int, start: int, target: memoryview) -> bool:
        """Fill `target` with bytes of a file; return whether that succeeded."""
        try:
            return self._move(os.preadv, file, start, target)
        except OSError:
            return False

    def write(self, file: int, unit: int, data: memoryview) -> None:
        """Write a verified unit. Raises: OSError."""
        self._mark(file, unit, 0)
        if not self._move(os.pwritev, file, unit * self._files[file].layout.unit_bytes, data):
            raise OSError(errno.EIO, "short write", self.folder)
        self._mark(file, unit, HAS)

    def make_room(self, size: int, max_bytes: int) -> None:
        """Make room for so many more bytes, within `max_bytes` for all versions.

        Removes unused copies, the least recently used one first. Raises: OSError if there is no room.
        """
        own = _taken_bytes(self.folder)
        if own + size > max_bytes:
            raise OSError(f"{own + size:,} bytes exceed the limit of {max_bytes:,}")
        above = os.path.dirname(self.folder)
        with os.scandir(above) as entries:
            directories = [each.path for each in entries if each.is_dir(follow_symlinks=False)]
        others = sorted(
            (_used_ns(path), path, _promised_bytes(path)) for path in directories if path != self.folder
        )
        taken = own + sum(bytes_of for _, _, bytes_of in others)
        for _, path, bytes_of in others:
            if taken + size <= max_bytes and is_free(above, size):
                return
            if _remove_unused(path):
                taken -= bytes_of
        if taken + size > max_bytes or not is_free(above, size):
            raise OSError(f"{above} has no room for {size:,} bytes beside the copies in use")

    def remove(self) -> None:
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
        """Move whole blocks around the page cache if possible; return whether all bytes were moved."""
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
        """Lock a file until `close`. Raises: BlockingIOError; OSError if it is being removed."""
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
            return -1  # for example tmpfs
        self._opened.append(direct)
        return direct


def is_kept(cache: str, digest: str) -> bool:
    """Return whether a complete copy should be present; if so, mark it as used now."""
    path = os.path.join(cache, DIRECTORY, digest, UNITS)
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
    """Return whether the disk has `size` bytes free, and a reserve."""
    system = os.statvfs(above)
    return system.f_bavail * system.f_frsize - size >= system.f_blocks * system.f_frsize * MIN_FREE_SHARE


def _used_ns(directory: str) -> int:
    try:
        return os.stat(os.path.join(directory, UNITS)).st_mtime_ns
    except OSError:
        return 0


def _taken_bytes(directory: str) -> int:
    return sum(found.st_blocks * 512 for found in _stats(directory))


def _promised_bytes(directory: str) -> int:
    """Return its size, or its final size if it is being written."""
    try:
        fd = _open_lock(os.path.join(directory, WRITTEN), 0)
    except OSError:
        return _taken_bytes(directory)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return sum(found.st_size for found in _stats(directory))
    finally:
        os.close(fd)
    return _taken_bytes(directory)


def _stats(directory: str) -> list[os.stat_result]:
    try:
        with os.scandir(directory) as entries:
            return [entry.stat(follow_symlinks=False) for entry in entries]
    except OSError:
        return []


def _remove_unused(directory: str) -> bool:
    """Remove a copy unless it is used; return whether it is gone."""
    try:
        fd = _open_lock(os.path.join(directory, USED), os.O_CREAT)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory)
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _open_lock(path: str, flags: int) -> int:
    return os.open(path, os.O_RDWR | flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def _check_own(directory: str) -> None:
    """Check a directory's owner. Raises: OSError if others may write to it."""
    try:
        check_owned_directory(directory)
    except NotOwnedError as error:
        raise OSError(str(error)) from error


def _move_all(move: _Move, fd: int, offset: int, data: memoryview) -> int:
    """Return the number of bytes moved: all, except at the end of a file."""
    done = 0
    while done < len(data):
        count = move(fd, [data[done:]], offset + done)
        if not count:
            break
        done += count
    return done
