"""The spool: a node's copies of spans, in one unnamed file of equal slots that vanishes with this process.

The least recently used span is evicted for a new one, unless it is held by a reader or a fill. A full disk means
fewer slots, in the end none; other nodes use the store then. For one event loop.

By sendfile, a socket gets the file's own pages, and may use them long after the span is released. So a reused slot
gets new pages.
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
from bootseer.linux.fallocate import punch_hole
from bootseer.peers.spans import SPAN_BYTES, ObjectName
from bootseer.storage.engine.extents import Extents
from bootseer.tuning import DEFAULTS

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

Key = tuple[ObjectName, int]  # with the number of the span


class SpoolFullError(Exception):
    """All slots are in use, or the disk is full."""


class SpooledSpan:
    """A span in the spool; offsets are relative to the span."""

    def __init__(self, key: Key, place: int) -> None:
        self.key = key
        self.place = place
        self.sandboxes = 0
        self.extents = Extents()  # present
        self.coming = Extents()  # in flight
        self.failure: Exception | None = None  # of the last fetch that failed
        self._changed = asyncio.Event()

    async def wait_changed(self) -> None:
        """Wait until data arrive or a fetch fails."""
        await self._changed.wait()

    def note(self) -> None:
        """Wake the waiting readers after data arrived or a fetch failed."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Spool:
    """A spool of at most `max_bytes` in a file in `folder`, which is created privately if missing.

    Raises: ConfigError if it cannot be created there.
    """

    def __init__(self, folder: str, max_bytes: int = DEFAULTS.peers.spool_bytes) -> None:
        if max_bytes < SPAN_BYTES:
            raise ConfigError(f"{folder}: a spool of {max_bytes} bytes; at least {SPAN_BYTES} are needed")
        self._most = max_bytes // SPAN_BYTES  # slots
        self._made = 0
        self._free: list[int] = []
        self._kept: OrderedDict[Key, SpooledSpan] = OrderedDict()  # the last used one at the end
        self._evicted = self._refused = 0
        self.fd = _open_nameless(folder)
        self.is_lent = punch_hole(self.fd, 0, SPAN_BYTES)  # False: data have to be copied

    def hold(self, key: Key) -> SpooledSpan:
        """Return the held span, maybe empty; call `release` afterwards. Raises: SpoolFullError."""
        kept = self._kept.get(key)
        if kept is None:
            kept = self._kept[key] = SpooledSpan(key, self._take_place())
        self._kept.move_to_end(key)
        kept.sandboxes += 1
        return kept

    def release(self, kept: SpooledSpan) -> None:
        kept.sandboxes -= 1
        if not kept.sandboxes and not kept.extents:
            self._drop(kept)

    @contextmanager
    def held(self, key: Key) -> Iterator[SpooledSpan]:
        kept = self.hold(key)
        try:
            yield kept
        finally:
            self.release(kept)

    def offset(self, kept: SpooledSpan, at: int) -> int:
        """Return the offset of a byte of a span in the file."""
        return kept.place * SPAN_BYTES + at

    def write(self, kept: SpooledSpan, at: int, data: memoryview) -> None:
        """Write data in a thread; the caller then updates `extents`. Raises: SpoolFullError, StorageError."""
        offset = self.offset(kept, at)
        try:
            while data:
                count = os.pwrite(self.fd, data, offset)
                data, offset = data[count:], offset + count
        except OSError as error:
            if error.errno in _FULL:
                raise SpoolFullError(f"the disk of the spool is full ({error.strerror})") from error
            raise StorageError(f"the spool cannot be written to: {error.strerror}") from error

    def shrink(self) -> None:
        """Stop creating slots on a full disk, and use one less."""
        self._most = max(0, min(self._most, self._made) - 1)

    def close(self) -> None:
        os.close(self.fd)

    def statistics(self) -> dict[str, int]:
        """Return counters; `refused`: spans without a slot."""
        return {
            "spans": len(self._kept),
            "kept_bytes": sum(kept.extents.total_bytes for kept in self._kept.values()),
            "max_spans": self._most,
            "evicted": self._evicted,
            "refused": self._refused,
        }

    def _take_place(self) -> int:
        while self._made - len(self._free) >= self._most or not self._free:
            if not self._free and self._made < self._most:
                self._made += 1
                return self._made - 1
            unheld = next((kept for kept in self._kept.values() if not kept.sandboxes), None)
            if unheld is None:
                self._refused += 1
                raise SpoolFullError("all slots of the spool are in use")
            self._evicted += 1
            self._drop(unheld)
        return self._free.pop()

    def _drop(self, kept: SpooledSpan) -> None:
        if self._kept.get(kept.key) is kept:
            del self._kept[kept.key]
            if not self.is_lent or punch_hole(self.fd, self.offset(kept, 0), SPAN_BYTES):
                self._free.append(kept.place)  # otherwise the slot is lost, as a socket may have its pages


def _open_nameless(directory: str) -> int:
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError:
            # for file systems without unnamed files
            fd, path = tempfile.mkstemp(prefix="bootseer-peers-", dir=directory)
            os.unlink(path)
            return fd
    except OSError as error:
        raise ConfigError(f"{directory}: the spool for other nodes cannot be created: {error.strerror}") from error
