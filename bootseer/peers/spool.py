"""What a node has of the spans that it owns: one nameless file of equal places, gone with this process.

The least recently used span makes room for a new one; whoever serves or fills a span holds it. A disk that is full
means fewer places, in the end none: then the others go to the store. For one event loop.

What is served is lent: by sendfile a socket gets the file's own pages, and may have them long after nobody holds
the span. So a place that is used again gets new pages.
"""

from __future__ import annotations

import asyncio
import errno
import os
import tempfile
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from bootseer.errors import ConfigError, StorageError
from bootseer.peers.spans import SPAN_BYTES, ObjectName
from bootseer.storage.extents import Extents
from bootseer.storage.fallocate import punch_hole

MOST_BYTES = 4 << 30
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Key = tuple[ObjectName, int]  # and the number of the span


class NoRoomError(Exception):
    """All places are in use, or the disk is full."""


class Kept:
    """A span in the spool; offsets are those in the span."""

    def __init__(self, key: Key, place: int) -> None:
        self.key = key
        self.place = place
        self.holders = 0
        self.extents = Extents()  # what is there
        self.coming = Extents()  # what is on its way
        self.failure: Exception | None = None  # of what came last and did not arrive
        self._changed = asyncio.Event()

    async def wait_changed(self) -> None:
        """Until more is there, or something failed."""
        await self._changed.wait()

    def note(self) -> None:
        """More is there, or something failed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Spool:
    """At most `most_bytes` in a file in `folder`, which is made for this user alone if it is missing.

    Raises: ConfigError when nothing can be kept there.
    """

    def __init__(self, folder: str, most_bytes: int = MOST_BYTES) -> None:
        if most_bytes < SPAN_BYTES:
            raise ConfigError(f"{folder}: a spool of {most_bytes} bytes; at least {SPAN_BYTES}")
        self._most = most_bytes // SPAN_BYTES  # places
        self._made = 0
        self._free: list[int] = []
        self._kept: OrderedDict[Key, Kept] = OrderedDict()  # the one used last at the end
        self._evicted = self._refused = 0
        self.fd = _open_nameless(folder)
        self.is_lent = punch_hole(self.fd, 0, SPAN_BYTES)  # else it has to be copied

    def hold(self, key: Key) -> Kept:
        """The span, maybe with nothing of it there; to be let go by `release`. Raises: NoRoomError."""
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = Kept(key, self._take_place())
        self._kept.move_to_end(key)
        kept.holders += 1
        return kept

    def release(self, kept: Kept) -> None:
        kept.holders -= 1
        if not kept.holders and not kept.extents:
            self._drop(kept)

    @contextmanager
    def held(self, key: Key) -> Iterator[Kept]:
        kept = self.hold(key)
        try:
            yield kept
        finally:
            self.release(kept)

    def offset(self, kept: Kept, at: int) -> int:
        """Where a byte of a span is in the file."""
        return kept.place * SPAN_BYTES + at

    def write(self, kept: Kept, at: int, data: memoryview) -> None:
        """In a thread; whoever calls it tells `extents` afterwards. Raises: NoRoomError, StorageError."""
        offset = self.offset(kept, at)
        try:
            while data:
                count = os.pwrite(self.fd, data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            if error.errno in _FULL:
                raise NoRoomError(f"the disk of the spool is full ({error.strerror})") from error
            raise StorageError(f"the spool cannot be written to: {error.strerror}") from error

    def shrink(self) -> None:
        """The disk is full: no more places are made, and one less is used again."""
        self._most = max(0, min(self._most, self._made) - 1)

    def close(self) -> None:
        os.close(self.fd)

    def statistics(self) -> dict[str, int]:
        """`refused`: spans for which there was no room."""
        return {
            "spans": len(self._kept),
            "kept_bytes": sum(kept.extents.total_bytes for kept in self._kept.values()),
            "most_spans": self._most,
            "evicted": self._evicted,
            "refused": self._refused,
        }

    def _take_place(self) -> int:
        while self._made - len(self._free) >= self._most or not self._free:
            if not self._free and self._made < self._most:
                self._made += 1
                return self._made - 1
            unheld = next((kept for kept in self._kept.values() if not kept.holders), None)
            if unheld is None:
                self._refused += 1
                raise NoRoomError("all places of the spool are in use")
            self._evicted += 1
            self._drop(unheld)
        return self._free.pop()

    def _drop(self, kept: Kept) -> None:
        if self._kept.get(kept.key) is kept:
            del self._kept[kept.key]
            if not self.is_lent or punch_hole(self.fd, self.offset(kept, 0), SPAN_BYTES):
                self._free.append(kept.place)  # else it is lost: a socket may have its pages


def _open_nameless(folder: str) -> int:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        try:
            return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            fd, path = tempfile.mkstemp(prefix="bootseer-peers-", dir=folder)  # where files must have names
            os.unlink(path)
            return fd
    except OSError as error:
        raise ConfigError(f"{folder}: nothing can be kept there for other nodes: {error.strerror}") from error
