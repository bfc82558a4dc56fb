"""The kernel side: FUSE mounts.

`mount` presents `MountedFiles` as a directory that unmodified programs read; a `Saver` gets what they write.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.mounts.fuse.mounting import Options, mount
    from bootseer.mounts.fuse.protocol import MountedFile, MountedFiles, SavedFile

_HOMES = {
    "MountedFile": "bootseer.mounts.fuse.protocol",
    "MountedFiles": "bootseer.mounts.fuse.protocol",
    "Options": "bootseer.mounts.fuse.mounting",
    "SavedFile": "bootseer.mounts.fuse.protocol",
    "mount": "bootseer.mounts.fuse.mounting",
}

__all__ = ["MountedFile", "MountedFiles", "Options", "SavedFile", "mount"]
__getattr__ = loader(__name__, _HOMES)
