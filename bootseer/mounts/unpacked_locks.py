"""The lock of an unpacked tree: shared by those who use it, held alone while it is unpacked or taken away.

A file `lock` in the tree's folder, or, where the cache's file system has no locks, one of this user's runtime
folder: a cache is one node's alone (bootseer.cache_folder). Whoever holds it alone beats: changes its time every
few seconds. One that was stopped, or hangs at a dead disk, is silent, and is not waited for any longer.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bootseer.blocks.locks import NO_LOCK_ERRNOS
from bootseer.cache_folder import make_private
from bootseer.mounts import tree_places

LOCK = "lock"
STAND_INS = "unpacked"  # in the runtime folder
BEAT_S = 5.0
SILENT_S = 300.0  # nobody is busy who has been silent for so long
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def open_lock(place: str) -> PlaceLock:
    """The lock of a place, not held yet; to be closed. Raises: OSError, FileNotFoundError without the place."""
    return PlaceLock(place)


class PlaceLock:
    """See the module's docstring. Calls raise OSError; ConfigError of a runtime folder that cannot be used."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.path = os.path.join(place, LOCK)
        self._fd = os.open(self.path, _OPEN, 0o600)
        self._held = self._fd  # what is locked: the file itself, or what stands in for it
        self.held_path = self.path

    def try_hold(self, *, is_shared: bool = False) -> bool:
        """False while others hold it."""
        kind = (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB
        try:
            fcntl.flock(self._held, kind)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in NO_LOCK_ERRNOS or self._held != self._fd:
                raise
            self.held_path, self._held = self._open_stand_in()
            return self.try_hold(is_shared=is_shared)
        return True

    def is_there(self) -> bool:
        """Whether it is still the place's own: the place may have been taken away, and be another one now."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.lstat(self.path))
        except FileNotFoundError:
            return False

    def beat_ns(self) -> int:
        """When its holder beat last: of use only to see whether it changes."""
        return os.fstat(self._held).st_mtime_ns

    @contextmanager
    def beating(self) -> Iterator[None]:
        """While it is held alone."""
        ended = threading.Event()

        def beat() -> None:
            try:
                while True:
                    os.utime(self._held)
                    if ended.wait(BEAT_S):
                        return
            except OSError:
                pass  # others take us for dead, and for such a disk that is right

        thread = threading.Thread(target=beat, name="unpack-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(BEAT_S)  # one that hangs at the disk is left

    def close(self) -> None:
        """From here on others can hold it."""
        for fd in {self._held, self._fd}:
            if fd >= 0:
                os.close(fd)
        self._held = self._fd = -1

    def _open_stand_in(self) -> tuple[str, int]:
        runtime = tree_places.prepare(tree_places.locate(os.environ))
        folder = os.path.join(runtime, STAND_INS)
        make_private(folder)
        name = hashlib.sha256(os.fsencode(os.path.realpath(self._place))).hexdigest()
        path = os.path.join(folder, name)
        return path, os.open(path, _OPEN, 0o600)
