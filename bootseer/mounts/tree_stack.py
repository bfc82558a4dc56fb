"""What the kernel shows of a tree: the device and the metadata by FUSE, and the tree itself, by EROFS, from them.

For the daemon's threads: the kernel asks the daemon while it mounts.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from bootseer.errors import BootseerError
from bootseer.mounts import kernel
from bootseer.mounts.erofs_mount import mount_erofs
from bootseer.mounts.flat_file import Device, FlatFile, Statistics
from bootseer.mounts.tree_device import ImpatientDevice
from bootseer.mounts.tree_places import Place, is_shown


class Stack:
    """The mounts of one daemon. Calls block; one at a time."""

    def __init__(self, place: Place, log: Callable[[str], None]) -> None:
        self._place, self._log = place, log
        self._flat: FlatFile | None = None

    @property
    def connection(self) -> int:
        """Of FUSE, for kernel.abort; -1 while there is none."""
        return -1 if self._flat is None else self._flat.connection

    def mount(self) -> None:
        """The folder for device and metadata, in which there is nothing yet.

        Raises: ConfigError, StorageError; what is mounted then is left.
        """
        for folder in (self._place.device, self._place.root):
            os.makedirs(folder, mode=0o700, exist_ok=True)
        self._flat = FlatFile(self._place.device, log=self._log)
        self._flat.mount()

    def serve(
        self, device: Device, metadata: Device, deadline_s: float, failed_again: Callable[[range], object]
    ) -> None:
        """Device and metadata, which nobody looks at yet.

        Args: metadata: what a mount reads of it is there; deadline_s: of the device's reads; failed_again: as
            ImpatientDevice.
        Raises: StorageError; what is mounted then is left.
        """
        assert self._flat is not None
        self._flat.serve(ImpatientDevice(device, deadline_s, failed_again), metadata)

    def show(self) -> None:
        """The tree, if its metadata is right. Raises: ConfigError, StorageError; what is mounted then is left."""
        self._mount_root()

    def unmount(self) -> None:
        """Whoever reads gets errors from here on. Afterwards the place is free for another daemon."""
        place, flat = self._place, self._flat
        try:
            if flat is not None:
                flat.abort()
            if os.path.lexists(place.root):
                kernel.unmount_anyway(place.root)
            if flat is not None:
                flat.stop()
            place.clear()
        except BootseerError as error:
            self._log(f"{place.folder}: {error}")  # the minder tries again
            return
        place.remove()

    def try_unmount(self) -> bool:
        """Whether nobody uses the tree, also no overlay above it and no other namespace; found out by trying.

        Then it is unmounted. Else it is shown as before, after a moment in which it was not. Not tried while it is
        seen in another folder here: what is shown anew has another device number, and by that number such folders
        are known to be this tree's (`bootseer image mounts`, `record`).
        """
        if self._is_seen_elsewhere():
            return False
        try:
            kernel.unmount(self._place.root)
        except BootseerError:
            return False  # somebody has a file of it open, or works in it
        try:
            kernel.unmount(self._place.device)
            return True
        except BootseerError:
            # The file system is still there, shown by others. They go on with it; here it is shown anew.
            self._mount_root()
            return False

    def is_shown(self) -> bool:
        """False after somebody else has unmounted something of it."""
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
