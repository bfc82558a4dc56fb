"""Folders in this user's cache that jobs use: locked as long as one does, gone a while after the last."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bootseer.blocks.locks import NO_LOCK_ERRNOS, try_lock, wait_lock
from bootseer.cache_folder import make_private
from bootseer.storage.os_errors import map_os_errors

LOCK, GOING = ".bootseer-lock", ".bootseer-going-"
OLD_S = 30 * 86_400.0
USE_BYTE = 0
_LOCK_S = 5.0


class UsedFolder:
    """A folder that is in use until it is closed, or its holder ends."""

    def __init__(self, path: str) -> None:
        """Makes it, if need be. Raises: StorageError."""
        self.path = path
        with map_os_errors(path):
            self._fd, self.has_locks = self._begin()
            os.utime(self._fd)  # `remove_old` goes by it

    def _begin(self) -> tuple[int, bool]:
        """The open file of the lock, and whether it is locked. Raises: OSError."""
        path = os.path.join(self.path, LOCK)
        while True:
            make_private(self.path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                is_locked = wait_lock(fd, USE_BYTE, timeout_s=_LOCK_S, is_shared=True)
                if os.path.lexists(path) and os.path.samestat(os.lstat(path), os.fstat(fd)):
                    return fd, is_locked
            except OSError as error:
                if error.errno in NO_LOCK_ERRNOS:
                    return fd, False
                os.close(fd)
                raise
            os.close(fd)  # `remove_old` was faster

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Whether no other job uses the folder; as long as the block lasts none begins to."""
        is_alone = self.has_locks and try_lock(self._fd, USE_BYTE)
        try:
            yield is_alone
        finally:
            if is_alone:
                try_lock(self._fd, USE_BYTE, is_shared=True)  # makes it less: nobody can be in the way

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def remove_old(above: str, name_pattern: str, older_s: float = OLD_S) -> list[str]:
    """Takes away the used folders in a folder that no job has used for so long; gives their paths."""
    try:
        names = sorted(os.listdir(above))
    except OSError:
        return []
    gone = []
    for name in names:
        path = os.path.join(above, name)
        if GOING in name:
            shutil.rmtree(path, ignore_errors=True)  # somebody was killed at it
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
        os.rename(path, going)  # in one step: who comes now makes a new one
        shutil.rmtree(going, ignore_errors=True)
        return True
    except OSError:
        return False  # no locks, or somebody was faster
    finally:
        os.close(fd)
