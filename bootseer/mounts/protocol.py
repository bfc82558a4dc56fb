"""What a mount needs from what it shows (`MountedFiles`) and from where saves go (`Saver`).

Both are called from many threads. Their errors are BootseerError: programs see EIO, the log says where and why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class MountedFile(NamedTuple):
    """One file that is shown."""

    size: int  # bytes
    mtime_ns: int = 0  # since the epoch
    # Where only whole pieces of the file can be checked, their size: nothing smaller is read then. 0: any range.
    checked_bytes: int = 0


class MountedFiles(Protocol):
    """Files that never change while they are mounted. Paths are relative, with `/` between names."""

    files: Mapping[str, MountedFile]
    version: str  # shown as the attribute user.bootseer.version; "" if there is none

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fills `target`; the range lies in the file. Raises when not all of it is known to be right."""


class SavedFile(NamedTuple):
    """One file of a save, whose bytes do not change until `Saver.save` has returned."""

    path: str  # below the mount
    size: int  # bytes
    fd: int  # to be read by offset (pread); -1 when the bytes are those of an earlier save:
    files: MountedFiles | None = None
    files_path: str = ""  # their path there


class Saver(Protocol):
    """Makes versions."""

    keep: int | None  # how many of the newest versions are kept, None for all

    def save(self, files: Sequence[SavedFile], step: int | None) -> MountedFiles:
        """Writes all files as one version that is seen whole or not at all; returns it to read from."""
