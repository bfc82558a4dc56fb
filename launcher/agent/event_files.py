"""New complete lines of a growing event file, which may also shrink, vanish or be replaced.

In: a path. Out: lines, and the number of unread bytes. Between two reads it keeps only an offset, so it needs no
descriptor and no memory. The caller decides how much to read, and when.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.rendezvous.event_batch import DropCounts

# A longer line cannot be sent.
TAKE_BYTES = 64 * 1024
_SKIP_BYTES = 1024 * 1024


class EventFile:
    """See the module's docstring; lines that the file has at first belong to an older run."""

    __slots__ = ("_at", "_cut", "_inode", "is_ended", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_ended = False  # its rank has ended
        self._at = self._inode = 0
        self._cut = ""  # why the line around `_at` is skipped
        if (found := self._look()) is not None:
            self._at, self._inode = found.st_size, found.st_ino

    def _look(self) -> os.stat_result | None:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            self._at, self._cut, self._inode = 0, "", 0  # a later file at this path is new
            return None
        except OSError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def behind(self) -> int:
        """Return the number of bytes that were not read."""
        found = self._look()
        if found is None:
            return 0
        if found.st_size < self._at or (self._inode and found.st_ino != self._inode):
            self._at, self._cut = 0, ""  # truncated, or another file: all its lines are new
        self._inode = found.st_ino
        return found.st_size - self._at

    def take(self, drops: DropCounts) -> tuple[list[bytes], int]:
        """Return the next lines without their ends, at most TAKE_BYTES, and the number of bytes read."""
        data = self._read(TAKE_BYTES)
        end = data.rfind(b"\n") + 1
        if not end:
            if len(data) < TAKE_BYTES:
                return [], 0
            self._at += len(data)
            self._cut = self._cut or "long"
            return [], len(data)
        self._at += end
        lines = data[: end - 1].split(b"\n")
        if self._cut:
            self._count_cut(drops)
            del lines[0]
        return lines, end

    def skip(self, max_bytes: int, drops: DropCounts) -> int:
        """Count lines instead of returning them; return the number of bytes."""
        skipped = 0
        while skipped < max_bytes:
            data = self._read(min(_SKIP_BYTES, max_bytes - skipped))
            if not data:
                break
            skipped += len(data)
            self._at += len(data)
            lines = data.count(b"\n")
            if self._cut and lines:
                self._count_cut(drops)
                lines -= 1
            drops.unread += lines
            if not data.endswith(b"\n"):
                self._cut = self._cut or "unread"
        return skipped

    def end(self, drops: DropCounts) -> None:
        """Finish the file: count what is left as a truncated line."""
        if self.behind() or self._cut:
            drops.torn += 1

    def _count_cut(self, drops: DropCounts) -> None:
        setattr(drops, self._cut, getattr(drops, self._cut) + 1)
        self._cut = ""

    def _read(self, size: int) -> bytes:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return b""
        try:
            return os.pread(fd, size, self._at)
        except OSError:
            return b""
        finally:
            os.close(fd)
