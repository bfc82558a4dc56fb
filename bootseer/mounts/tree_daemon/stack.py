"""The mounts of a tree: device and metadata by FUSE, and from these the tree itself, by EROFS.

For the daemon's threads: the kernel sends requests to the daemon during the mount.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

from bootseer.errors import BootseerError
from bootseer.linux import mount as kernel
from bootseer.logs import get_logger
from bootseer.mounts.device.erofs_mount import mount_erofs
from bootseer.mounts.device.file import Device, Done, FlatFile, Statistics
from bootseer.mounts.tree_daemon.places import TreeDirectory, is_shown
from bootseer.tree.index import BLOCK_BYTES

_log = get_logger(__name__)

AGAIN_S = 0.5  # the kernel's second read comes within it
LATE_SHARE = 0.5  # of the deadline; an earlier failure may be retried
MAX_BLOCKS = 4096  # remembered


class TreeMounts:
    """The mounts of one daemon. Calls block; one at a time."""

    def __init__(self, place: TreeDirectory) -> None:
        self._place = place
        self._flat: FlatFile | None = None

    @property
    def connection(self) -> int:
        """Return the number of the FUSE connection, for kernel.abort; -1 while there is none."""
        return -1 if self._flat is None else self._flat.connection

    def mount(self) -> None:
        """Mount the directory for device and metadata, which is still empty.

        Raises: ConfigError, StorageError; mounts are left then.
        """
        for directory in (self._place.device, self._place.root):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        self._flat = FlatFile(self._place.device)
        self._flat.mount()

    def serve(
        self, device: Device, metadata: Device, deadline_s: float, failed_again: Callable[[range], object]
    ) -> None:
        """Serve device and metadata, which no reader uses yet.

        Args: metadata: complete enough for a mount; deadline_s: of the device's reads; failed_again: as in
            FailFastDevice.
        Raises: StorageError; mounts are left then.
        """
        assert self._flat is not None
        self._flat.serve(FailFastDevice(device, deadline_s, failed_again), metadata)

    def show(self) -> None:
        """Mount the tree, with validated metadata. Raises: ConfigError, StorageError; mounts are left then."""
        self._mount_root()

    def unmount(self) -> None:
        """Unmount; reads fail from now on. Afterwards the place is free for another daemon."""
        place, flat = self._place, self._flat
        try:
            if flat is not None:
                flat.abort()
            if os.path.lexists(place.root):
                kernel.unmount_lazily(place.root)
            if flat is not None:
                flat.stop()
            place.clear()
        except BootseerError as error:
            _log.info("%s: %s", place.folder, error)  # the reaper retries it
            return
        place.remove()

    def try_unmount(self) -> bool:
        """Unmount an unused tree; return whether it was unused, also by overlays and other namespaces.

        Only a trial shows that. A tree in use is mounted again at once, after a moment without the mount. It is
        not tried while the tree is mounted in another directory here. The new mount has another device number, and
        that number identifies such directories as this tree's (`bootseer image mounts`, `record`).
        """
        if self._is_seen_elsewhere():
            return False
        try:
            kernel.unmount(self._place.root)
        except BootseerError:
            return False  # a process has a file of it open, or works in it
        try:
            kernel.unmount(self._place.device)
            return True
        except BootseerError:
            # The file system still exists in other mounts, which keep it. Here it is mounted again.
            self._mount_root()
            return False

    def is_shown(self) -> bool:
        """Return whether it is mounted; False after another process has unmounted a part of it."""
        return self._flat is not None and self._flat.is_serving() and is_shown(self._place)

    def statistics(self) -> Statistics:
        return Statistics(0, 0, 0, 0, 0) if self._flat is None else self._flat.statistics()

    def _is_seen_elsewhere(self) -> bool:
        mounted = kernel.mounts()
        devices = {(each.major, each.minor) for each in mounted if each.target == self._place.root}
        return any((each.major, each.minor) in devices for each in mounted if each.target != self._place.root)

    def _mount_root(self) -> None:
        assert self._flat is not None
        mount_erofs(self._flat.metadata_path, self._flat.path, self._place.root)


class FailFastDevice:
    """A device that does not repeat a late failure's wait. Thread-safe."""

    def __init__(
        self, device: Device, deadline_s: float, failed_again: Callable[[range], object] = lambda _: None
    ) -> None:
        """Args: failed_again: receives the blocks of a read that is about to fail without a wait."""
        self.size = device.size
        self.try_read = device.try_read  # unwrapped: it is called for each read
        self._device, self._failed_again = device, failed_again
        self._late_s = deadline_s * LATE_SHARE
        self._failed_s: dict[int, float] = {}  # when the last read of a block failed

    def read_later(self, offset: int, length: int, done: Done) -> None:
        """As `Device`."""
        now_s = time.monotonic()
        failed_s = self._failed_s
        if failed_s and any(now_s - failed_s.get(each, -AGAIN_S) < AGAIN_S for each in _blocks(offset, length)):
            self._failed_again(_blocks(offset, length))
            done(None)
            return
        self._device.read_later(offset, length, partial(self._finish, offset, length, now_s, done))

    def _finish(
        self, offset: int, length: int, begin_s: float, done: Done, data: memoryview | bytes | None
    ) -> None:
        if data is None and (now_s := time.monotonic()) - begin_s >= self._late_s:
            if len(self._failed_s) > MAX_BLOCKS:
                self._failed_s.clear()
            self._failed_s.update(dict.fromkeys(_blocks(offset, length), now_s))
        done(data)


def _blocks(offset: int, length: int) -> range:
    return range(offset // BLOCK_BYTES, (offset + length - 1) // BLOCK_BYTES + 1)
