"""Storage of files while they are written: memory up to a bound, beyond it unnamed files on a local disk.

Both vanish when this process ends in any manner.
"""

from __future__ import annotations

import os
import threading

from bootseer.errors import ConfigError

COPY_BYTES = 8 << 20


class Spool:
    """The space for all files that are being written."""

    def __init__(self, memory_bytes: int, folder: str) -> None:
        self._memory_bytes = memory_bytes
        self._used_bytes = 0  # of memory
        self._directory = os.path.abspath(folder)
        self._lock = threading.Lock()
        if not os.path.isdir(self._directory) or not os.access(self._directory, os.W_OK | os.X_OK):
            raise ConfigError(f"{folder}: is no writable directory; saves wait there (--spool DIR)")

    def create(self) -> SpoolFile:
        return SpoolFile(self, os.memfd_create("bootseer-save", os.MFD_CLOEXEC))

    def try_reserve(self, size: int) -> bool:
        """Reserve so many more bytes of memory; return False if there are too few."""
        with self._lock:
            if self._used_bytes + size > self._memory_bytes:
                return False
            self._used_bytes += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._used_bytes -= size

    def open_on_disk(self) -> int:
        """Open an unnamed file on the disk."""
        try:
            return os.open(self._directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            import tempfile  # file systems without unnamed files

            fd, path = tempfile.mkstemp(prefix="bootseer-save-", dir=self._directory)
            os.unlink(path)
            return fd

    def free_bytes(self) -> int:
        """Return about how much more can be written."""
        found = os.statvfs(self._directory)
        return self._memory_bytes - self._used_bytes + found.f_bavail * found.f_frsize


class SpoolFile:
    """One file; all calls may come from any thread. `fd` stays the same between writes."""

    def __init__(self, spool: Spool, fd: int) -> None:
        self._spool = spool
        self._lock = threading.Lock()
        self.fd = fd
        self.size = 0
        self._reserved_bytes = 0
        self._is_in_memory = True

    def write(self, data: memoryview | bytes, offset: int) -> int:
        with self._lock:
            self._make_room(offset + len(data))
            done = 0
            with memoryview(data) as view:
                while done < len(view):
                    done += os.pwrite(self.fd, view[done:], offset + done)
            self.size = max(self.size, offset + done)
            return done

    def truncate(self, size: int) -> None:
        with self._lock:
            if size > self.size:
                self._make_room(size)
            os.ftruncate(self.fd, size)
            self.size = size
            if self._is_in_memory and size < self._reserved_bytes:
                self._spool.give_back(self._reserved_bytes - size)
                self._reserved_bytes = size

    def read_into(self, target: memoryview, offset: int) -> int:
        """Read into `target`; return the length, which is less only at the end. Raises ValueError when closed."""
        with self._lock:
            if self.fd < 0:
                raise ValueError("closed")
            done = 0
            while done < len(target):
                got = os.preadv(self.fd, [target[done:]], offset + done)
                if not got:
                    break
                done += got
            return done

    def close(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1
                self._spool.give_back(self._reserved_bytes)
                self._reserved_bytes = 0

    def _make_room(self, size: int) -> None:
        """Reserve memory for this size, holes included; without memory the whole file moves to the disk."""
        if not self._is_in_memory or size <= self._reserved_bytes:
            return
        # In steps, so that many small writes need few reservations.
        step = max(size, self._reserved_bytes + min(self._reserved_bytes, COPY_BYTES))
        for wanted in (step, size):
            if self._spool.try_reserve(wanted - self._reserved_bytes):
                self._reserved_bytes = wanted
                return
        disk = self._spool.open_on_disk()
        try:
            at = 0
            while at < self.size:
                at += os.sendfile(disk, self.fd, at, min(COPY_BYTES, self.size - at))
        except BaseException:
            os.close(disk)
            raise
        os.close(self.fd)
        self.fd, self._is_in_memory = disk, False
        self._spool.give_back(self._reserved_bytes)
        self._reserved_bytes = 0
