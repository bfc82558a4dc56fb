"""New whole lines of one event file, as it grows; also when it shrinks, vanishes or is another one by then.

In: a path, and where to begin. Out: lines, and how much has not been taken. Nothing is held between two looks but
a place in the file, so it costs no descriptor and no memory; whoever asks decides how much is read and when.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.rendezvous.event_batch import Drops

# A line that does not end within so much is none that could be sent.
TAKE_BYTES = 64 * 1024
_SKIP_BYTES = 1024 * 1024


class EventFile:
    """See the module's docstring; what is there when it is made belongs to an older run."""

    __slots__ = ("_at", "_cut", "_inode", "is_ended", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_ended = False  # nobody writes it any more
        self._at = self._inode = 0
        self._cut = ""  # why the line that `_at` is in the middle of is not taken
        if (found := self._look()) is not None:
            self._at, self._inode = found.st_size, found.st_ino

    def _look(self) -> os.stat_result | None:
        try:
            found = os.lstat(self.path)
        except FileNotFoundError:
            self._at, self._cut, self._inode = 0, "", 0  # what comes there later is new
            return None
        except OSError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    def behind(self) -> int:
        """How many bytes there are now that were not taken."""
        found = self._look()
        if found is None:
            return 0
        if found.st_size < self._at or (self._inode and found.st_ino != self._inode):
            self._at, self._cut = 0, ""  # cut, or another file: what is there now is new
        self._inode = found.st_ino
        return found.st_size - self._at

    def take(self, drops: Drops) -> tuple[list[bytes], int]:
        """The next lines without their ends, at most TAKE_BYTES of them, and how many bytes that were."""
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

    def skip(self, most_bytes: int, drops: Drops) -> int:
        """Counts lines instead of taking them; how many bytes that were."""
        skipped = 0
        while skipped < most_bytes:
            data = self._read(min(_SKIP_BYTES, most_bytes - skipped))
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

    def end(self, drops: Drops) -> None:
        """Nobody will look again: what is left of it is a line that was cut off."""
        if self.behind() or self._cut:
            drops.torn += 1

    def _count_cut(self, drops: Drops) -> None:
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
