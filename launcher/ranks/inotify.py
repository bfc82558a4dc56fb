"""A watch on files by inotify, as a non-blocking descriptor for the event loop.

In go paths, out come the numbers of the watches whose files were written to. Separate because it is the only
place that speaks to the C library for this; imported only when console copies of log files are asked for.
"""

from __future__ import annotations

import ctypes
import os
import struct

_MODIFIED = 0x2
_OVERFLOWED = 0x4000
_HEADER = struct.Struct("iIII")
ALL = -1  # told instead of a watch: events were lost, look at every file


class Inotify:
    """One inotify instance; OSError when the system has none to give."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd: int = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        if self.fd < 0:
            self._fail()

    def watch(self, path: str) -> int:
        """Watches the file that is at `path` now; the same file gives the same number again."""
        number: int = self._libc.inotify_add_watch(self.fd, os.fsencode(path), _MODIFIED)
        if number < 0:
            self._fail(path)
        return number

    def unwatch(self, number: int) -> None:
        self._libc.inotify_rm_watch(self.fd, number)

    def read(self) -> set[int]:
        """The watches with news, and ALL when some were lost; empty when there is nothing to read."""
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
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
