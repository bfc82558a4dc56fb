"""The lock of an unpacked tree: shared by its users, exclusive while it is unpacked or evicted.

A file `lock` in the tree's directory, or, where the cache's file system has no locks, one of this user's runtime
directory: a cache belongs to one node only (bootseer.cache_folder). An exclusive holder sends heartbeats: it
changes the file's time every few seconds. A holder that was stopped, or hangs at a dead disk, sends none: others
stop waiting.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from bootseer.cache_folder import make_private_dir
from bootseer.linux.locks import NO_LOCK_ERRNOS, is_at, try_flock
from bootseer.mounts.tree_daemon import places as tree_places

LOCK = "lock"
STAND_INS = "unpacked"  # in the runtime directory
HEARTBEAT_S = 5.0
HEARTBEAT_TIMEOUT_S = 300.0  # a holder without a heartbeat for so long is not busy
_OPEN = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def open_lock(place: str) -> PlaceLock:
    """Open the lock of a place; the caller closes it. Raises: OSError, FileNotFoundError without the place."""
    return PlaceLock(place)


class PlaceLock:
    """One lock. Calls raise OSError; ConfigError for an unusable runtime directory."""

    def __init__(self, place: str) -> None:
        self._place = place
        self.path = os.path.join(place, LOCK)
        self._fd = os.open(self.path, _OPEN, 0o600)
        self._held = self._fd  # what is locked: the file itself, or its stand-in
        self.held_path = self.path

    def try_hold(self, *, is_shared: bool = False) -> bool:
        """Hold the lock; return False while others hold it."""
        try:
            return try_flock(self._held, is_shared=is_shared)
        except OSError as error:
            if error.errno not in NO_LOCK_ERRNOS or self._held != self._fd:
                raise
            self.held_path, self._held = self._open_stand_in()
            return self.try_hold(is_shared=is_shared)

    def is_there(self) -> bool:
        """Return whether it is still the lock of the place, which may have been replaced."""
        return is_at(self._fd, self.path)

    def beat_ns(self) -> int:
        """Return the time of the holder's last heartbeat, only for comparison with a later one."""
        return os.fstat(self._held).st_mtime_ns

    @contextmanager
    def sending_heartbeats(self) -> Iterator[None]:
        """Send heartbeats while it is held exclusively."""
        ended = threading.Event()

        def beat() -> None:
            try:
                while True:
                    os.utime(self._held)
                    if ended.wait(HEARTBEAT_S):
                        return
            except OSError:
                pass  # others consider this process dead, which is right for such a disk

        thread = threading.Thread(target=beat, name="unpack-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(HEARTBEAT_S)  # one that hangs at the disk is left

    def close(self) -> None:
        for fd in {self._held, self._fd}:
            if fd >= 0:
                os.close(fd)
        self._held = self._fd = -1

    def _open_stand_in(self) -> tuple[str, int]:
        runtime = tree_places.prepare(tree_places.locate(os.environ))
        directory = os.path.join(runtime, STAND_INS)
        make_private_dir(directory)
        name = hashlib.sha256(os.fsencode(os.path.realpath(self._place))).hexdigest()
        path = os.path.join(directory, name)
        return path, os.open(path, _OPEN, 0o600)
