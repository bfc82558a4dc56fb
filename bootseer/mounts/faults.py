"""Journal of failed reads of a mount: a line for each failure, written before the reader gets its error.

In: failures, from the process that serves the mount. Out: those since a given time, for bootrun, which reports why
ranks have ended. It is a file, as a file can be read even if the process that wrote it is stopped or gone.
Times are those of the monotonic clock. Standard library only, as bootrun imports it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

MAX_FILE_BYTES = 256 << 10  # then it is emptied
MAX_READ_BYTES = 64 << 10  # the newest
MAX_WHY_CHARACTERS = 600
MAX_BLOCKS = 64  # of one line
SAME_NS = 200_000_000  # an equal line is not written again within it


def path_beside(directory: str) -> str:
    """Return the path of the journal of a mount that has no other place for one."""
    return f"{directory}.faults"


class Fault(NamedTuple):
    """A read that failed, or the end of the mount."""

    at_ns: int
    why: str  # one line: block, pack, store, cause
    is_damage: bool = False  # wrong or missing bytes: a later retry fails as well
    blocks: tuple[int, ...] = ()  # of a tree
    is_wait: bool = False  # no failure yet: a reader waits


class Journal:
    """Writes faults. Its own errors are ignored."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._last = Fault(0, "")

    def note(
        self, why: str, *, is_damage: bool = False, blocks: Sequence[int] = (), is_wait: bool = False
    ) -> None:
        """Record a failure of this moment; it is in the file when this returns."""
        now_ns, line = time.monotonic_ns(), " ".join(why.split())[:MAX_WHY_CHARACTERS]
        fault = Fault(now_ns, line, is_damage, tuple(blocks[:MAX_BLOCKS]), is_wait)
        if fault.why == self._last.why and now_ns - self._last.at_ns < SAME_NS:
            return
        self._last = fault
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            fd = os.open(self._path, flags, 0o600)
            try:
                if os.fstat(fd).st_size > MAX_FILE_BYTES:
                    os.ftruncate(fd, 0)
                os.write(fd, json.dumps(fault).encode("ascii") + b"\n")
            finally:
                os.close(fd)
        except OSError:
            pass


def read_faults(path: str, since_ns: int) -> list[Fault]:
    """Return the faults since then, in order; none where there is no such file. Invalid lines are skipped."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return []
    try:
        data = os.pread(fd, MAX_READ_BYTES, max(0, os.fstat(fd).st_size - MAX_READ_BYTES))
    except OSError:
        return []
    finally:
        os.close(fd)
    faults = (_decode(line) for line in data.splitlines())
    return [fault for fault in faults if fault is not None and fault.at_ns >= since_ns]


def _decode(line: bytes) -> Fault | None:
    try:
        at_ns, why, is_damage, blocks, is_wait = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    are_flags = isinstance(is_damage, bool) and isinstance(is_wait, bool)
    if not (isinstance(at_ns, int) and isinstance(why, str) and are_flags and isinstance(blocks, list)):
        return None
    return Fault(at_ns, why, is_damage, tuple(each for each in blocks if isinstance(each, int)), is_wait)
