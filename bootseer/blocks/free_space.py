"""Free space for a tree that grows: checked now and then, not at each block. Without space, writes pause."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from bootseer.logs import get_logger

_log = get_logger(__name__)

CHECK_BYTES = 64 << 20  # written between checks of the limit
FULL_S = 30.0  # without space, nothing is written for so long
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})

FreeSpaceCall = Callable[[bool], bool]  # (is the disk full now) -> whether there is space


class FreeSpace:
    """Free space of one tree in `folder`. `full_reason`: why nothing is stored now; else empty. Thread-safe."""

    def __init__(self, folder: str, make_room: FreeSpaceCall, full_reason: str = "") -> None:
        self.full_reason = full_reason
        self._directory, self._make_room = folder, make_room
        self._unchecked_bytes = CHECK_BYTES  # the first write checks
        self._full_until_s = 0.0
        self._has_reported = bool(full_reason)

    def is_there(self, length: int) -> bool:
        """Return whether so many bytes may be written, as far as is known. Other trees may be evicted for them."""
        if self.full_reason and time.monotonic() < self._full_until_s:
            return False
        self._unchecked_bytes += length
        if not self.full_reason and self._unchecked_bytes < CHECK_BYTES:
            return True
        self._unchecked_bytes = 0
        if not self._make_room(False):
            self._close(f"{self._directory}: the cache has reached its limit and all of it is in use")
            return False
        self.full_reason = ""
        return True

    def failed(self, error: OSError, *, is_again: bool) -> bool:
        """Handle a failed write; return whether to retry it. Any other disk error counts as a full disk."""
        if not is_again and error.errno in FULL_ERRNOS and self._make_room(True):
            return True
        self._close(f"{self._directory}: {error.strerror}")
        return False

    def _close(self, reason: str) -> None:
        self._full_until_s = time.monotonic() + FULL_S
        self.full_reason = reason
        if not self._has_reported:
            self._has_reported = True
            _log.info("%s: blocks are fetched as they are read, and not cached", reason)
