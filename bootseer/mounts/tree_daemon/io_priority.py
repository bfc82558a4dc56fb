"""I/O priority on a node: data for imports is read from stores before data that ranks need later.

A process that fetches the hot blocks of a start holds a lock in the user's runtime directory meanwhile. A process
that reads much data for later checks the lock, and then reads little, or nothing. It affects only speed: without
the directory or the lock, no reader yields.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bootseer.linux.locks import try_flock

FILE = "hot"
TRIES, WAIT_S = 3, 0.001  # a check holds the lock for a moment
FEW_PROCESSORS = 4  # with fewer, concurrent reads and checks slow down imports


def reads_beside(processors: int) -> int:
    """PURE: return how many reads of data for later may be in flight meanwhile."""
    return 1 if processors >= FEW_PROCESSORS else 0


@contextmanager
def fetching_hot(runtime: str) -> Iterator[None]:
    """Hold the lock while hot blocks are fetched. Args: runtime: directory of this user (places.py)."""
    fd = _open(runtime, os.O_CREAT)
    try:
        for _ in range(TRIES if fd >= 0 else 0):
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(WAIT_S)
        yield
    finally:
        if fd >= 0:
            os.close(fd)


def is_fetching_hot(runtime: str) -> bool:
    """Return whether a process of this user now fetches hot blocks to this node."""
    fd = _open(runtime, 0)
    if fd < 0:
        return False
    try:
        return not try_flock(fd)
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(fd)


def _open(runtime: str, flags: int) -> int:
    """Open the file; return -1 where there is none."""
    try:
        return os.open(os.path.join(runtime, FILE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except OSError:
        return -1
