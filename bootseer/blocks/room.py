"""Whether a tree may grow: looked at now and then, not at each block. Without room it rests for a while."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

CHECK_BYTES = 64 << 20  # written between looks at the limit
FULL_S = 30.0  # without room, nothing is written for so long
FULL_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})

MakeRoom = Callable[[bool], bool]  # (is the disk full now) -> whether there is room


class Room:
    """Of one tree in `folder`. `full_reason`: why nothing is kept at the moment; empty else. Thread-safe."""

    def __init__(
        self, folder: str, make_room: MakeRoom, log: Callable[[str], None], full_reason: str = ""
    ) -> None:
        self.full_reason = full_reason
        self._folder, self._make_room, self._log = folder, make_room, log
        self._unchecked_bytes = CHECK_BYTES  # the first write looks
        self._full_until_s = 0.0
        self._has_told = bool(full_reason)

    def is_there(self, length: int) -> bool:
        """Whether so many bytes may be written, as far as is known. Others may be pushed out for them."""
        if self.full_reason and time.monotonic() < self._full_until_s:
            return False
        self._unchecked_bytes += length
        if not self.full_reason and self._unchecked_bytes < CHECK_BYTES:
            return True
        self._unchecked_bytes = 0
        if not self._make_room(False):
            self._close(f"{self._folder}: the cache has reached its limit and all of it is in use")
            return False
        self.full_reason = ""
        return True

    def failed(self, error: OSError, *, is_again: bool) -> bool:
        """A write failed: whether to try it once more. A disk that fails otherwise is as good as full."""
        if not is_again and error.errno in FULL_ERRNOS and self._make_room(True):
            return True
        self._close(f"{self._folder}: {error.strerror}")
        return False

    def _close(self, reason: str) -> None:
        self._full_until_s = time.monotonic() + FULL_S
        self.full_reason = reason
        if not self._has_told:
            self._has_told = True
            self._log(f"{reason}: blocks are fetched as they are read, and not kept")
