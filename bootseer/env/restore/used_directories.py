"""Directories in this user's cache: locked while a job uses them, removed some time after the last use."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bootseer.cache_folder import make_private_dir
from bootseer.linux.locks import NO_LOCK_ERRNOS, is_at, try_lock, wait_lock
from bootseer.storage.os_errors import map_os_errors

LOCK, GOING = ".bootseer-lock", ".bootseer-going-"
OLD_S = 30 * 86_400.0
USE_BYTE = 0
_LOCK_S = 5.0


class UsedDirectory:
    """A directory that is in use until it is closed, or its process ends."""

    def __init__(self, path: str) -> None:
        """Create the directory, if necessary, and lock it. Raises: StorageError."""
        self.path = path
        with map_os_errors(path):
            self._fd, self.has_locks = self._begin()
            os.utime(self._fd)  # its time is used by `remove_old`

    def _begin(self) -> tuple[int, bool]:
        """Return the open lock file, and whether it is locked. Raises: OSError."""
        path = os.path.join(self.path, LOCK)
        while True:
            make_private_dir(self.path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                is_locked = wait_lock(fd, USE_BYTE, timeout_s=_LOCK_S, is_shared=True)
                if is_at(fd, path):
                    return fd, is_locked
            except OSError as error:
                if error.errno in NO_LOCK_ERRNOS:
                    return fd, False
                os.close(fd)
                raise
            os.close(fd)  # `remove_old` has removed it

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Yield whether no other job uses the directory; none can begin to during the block."""
        is_alone = self.has_locks and try_lock(self._fd, USE_BYTE)
        try:
            yield is_alone
        finally:
            if is_alone:
                try_lock(self._fd, USE_BYTE, is_shared=True)  # a downgrade, which cannot conflict

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def remove_old(above: str, name_pattern: str, older_s: float = OLD_S) -> list[str]:
    """Remove directories that no job has used for `older_s`. Return their paths."""
    try:
        names = sorted(os.listdir(above))
    except OSError:
        return []
    gone = []
    for name in names:
        path = os.path.join(above, name)
        if GOING in name:
            shutil.rmtree(path, ignore_errors=True)  # left by a killed process
        elif re.fullmatch(name_pattern, name) and _try_remove(path, older_s):
            gone.append(path)
    return gone


def _try_remove(path: str, older_s: float) -> bool:
    try:
        fd = os.open(os.path.join(path, LOCK), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if time.time() - os.fstat(fd).st_mtime < older_s or not try_lock(fd, USE_BYTE):
            return False
        going = f"{path}{GOING}{os.getpid()}"
        os.rename(path, going)  # atomic: a new job creates a new directory
        shutil.rmtree(going, ignore_errors=True)
        return True
    except OSError:
        return False  # no locks, or another process was faster
    finally:
        os.close(fd)
