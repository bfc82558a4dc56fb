"""The kernel side: FUSE mounts.

`mount` shows any `MountedFiles` as a folder that unmodified programs read, and hands what they write to a `Saver`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
