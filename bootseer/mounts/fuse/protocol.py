"""The interfaces of a mount: to the files that it presents (`MountedFiles`) and to the target of saves (`Saver`).

Both are called from many threads. Their errors are BootseerError: programs get EIO, the log has place and cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol


class MountedFile(NamedTuple):
    size: int  # bytes
    mtime_ns: int = 0  # since the epoch
    # If only whole pieces of the file can be verified, their size: no smaller range is read. 0: any range.
    checked_bytes: int = 0


class MountedFiles(Protocol):
    """Files that never change while they are mounted. Paths are relative, with `/` between names."""

    files: Mapping[str, MountedFile]
    version: str  # readable as the attribute user.bootseer.version; "" if there is none

    def read_into(self, path: str, offset: int, target: memoryview) -> None:
        """Fill `target`; the range lies in the file. Raises an error unless all of it is verified."""


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
        """Write all files as one version, atomically; return it to read from."""
