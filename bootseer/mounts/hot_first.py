"""On a node, what imports wait for is read from stores before what ranks need later.

Who brings the hot blocks of a start holds a lock in the user's runtime folder meanwhile; who reads much that is
needed later looks whether somebody does, and reads little then, or nothing. It is about speed alone: without the
folder or the lock, nobody makes way.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

FILE = "hot"
TRIES, WAIT_S = 3, 0.001  # who looks holds the lock for a moment
FEW_PROCESSORS = 4  # with fewer, what is read and checked beside takes time from imports


def reads_beside(processors: int) -> int:
    """PURE: how many reads of what is needed later may be on their way meanwhile."""
    return 1 if processors >= FEW_PROCESSORS else 0


@contextmanager
def bringing(runtime: str) -> Iterator[None]:
    """While hot blocks are brought. Args: runtime: folder of this user (tree_places.py)."""
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


def is_bringing(runtime: str) -> bool:
    """Whether somebody of this user brings hot blocks now, to this node."""
    fd = _open(runtime, 0)
    if fd < 0:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False  # a file system without locks
    finally:
        os.close(fd)
    return False


def _open(runtime: str, flags: int) -> int:
    """-1 where there is no such file."""
    try:
        return os.open(os.path.join(runtime, FILE), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
    except OSError:
        return -1
