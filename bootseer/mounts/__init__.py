"""The kernel side: FUSE mounts.

`mount` shows any `MountedFiles` as a folder that unmodified programs read, and hands what they write to a `Saver`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootseer.lazy import loader

if TYPE_CHECKING:
    from bootseer.mounts.mounting import Options, mount
    from bootseer.mounts.protocol import MountedFile, MountedFiles, SavedFile, Saver

_HOMES = {
    "MountedFile": "protocol",
    "MountedFiles": "protocol",
    "Options": "mounting",
    "SavedFile": "protocol",
    "Saver": "protocol",
    "mount": "mounting",
}

__all__ = ["MountedFile", "MountedFiles", "Options", "SavedFile", "Saver", "mount"]
__getattr__ = loader(__name__, _HOMES)
