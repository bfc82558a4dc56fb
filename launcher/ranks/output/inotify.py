"""An inotify watch on files, as a non-blocking descriptor for the event loop.

In: paths. Out: the numbers of the watches whose files were written to. Separate because only this module calls the
C library for this; imported only when copies of log files on the console are requested.
"""

from __future__ import annotations

import os
import struct

from bootseer.linux.syscalls import last_error, libc

_MODIFIED = 0x2
_OVERFLOWED = 0x4000
_HEADER = struct.Struct("iIII")
ALL = -1  # reported instead of a watch: events were lost, so inspect every file


class Inotify:
    """One inotify instance. Raises: OSError if the system has none left."""

    def __init__(self) -> None:
        self._libc = libc()
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            self._fail()

    def watch(self, path: str) -> int:
        """Watch the file that is at `path` now; the same file gives the same number again."""
        number: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), _MODIFIED)
        if number < 0:
            self._fail(path)
        return number

    def unwatch(self, number: int) -> None:
        self._libc.inotify_rm_watch(self.fd, number)

    def read(self) -> set[int]:
        """Return the watches with events, and ALL if events were lost; empty if there is nothing to read."""
        try:
            data = os.read(self.fd, 65536)
        except BlockingIOError:
            return set()
        found = set()
        start = 0
        while start < len(data):
            number, mask, _, name_bytes = _HEADER.unpack_from(data, start)
            start += _HEADER.size + name_bytes
            if mask & _OVERFLOWED:
                found.add(ALL)
            elif mask & _MODIFIED:
                found.add(number)
        return found

    def close(self) -> None:
        os.close(self.fd)

    def _fail(self, path: str | None = None) -> None:
        error = last_error()
        raise OSError(error.errno, error.strerror, path)
