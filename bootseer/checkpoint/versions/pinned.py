"""The chosen version of a checkpoint, and the criteria of the choice. PURE: records."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection
from typing import NamedTuple

from bootseer.checkpoint.format import manifest as stored
from bootseer.checkpoint.io.direct import StoredFile
from bootseer.errors import CheckpointError, IntegrityError

STRIPED, PLAIN = "striped", "plain"


class Pinned(NamedTuple):
    """One complete version. Stripe paths of `files` are relative to the store's root."""

    kind: str  # STRIPED or PLAIN
    folder: str  # in the store: of the version, of the plain checkpoint, or above a single file
    # Of a striped checkpoint, its version. Of a single save's directory, the path below the requested one
    # ("step-10", "step-10/v-<version>"). "" for a plain checkpoint that was requested itself.
    version: str
    digest: str  # SHA-256, hex
    files: tuple[StoredFile, ...]
    step: int | None = None

    @property
    def striped_version(self) -> str:
        """The version's own name, "" for a plain checkpoint."""
        return (
            posixpath.basename(self.version).removeprefix(stored.DIRECTORY_PREFIX) if self.kind == STRIPED else ""
        )

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.layout.size for file in self.files)


class NoCompleteCheckpoint(CheckpointError):  # noqa: N818  named as the others of the tree
    """Files exist, but no complete checkpoint."""


class VersionFilter(NamedTuple):
    without: Collection[str] = ()  # digests of versions that cannot be loaded
    is_striped: bool = False
    on_damaged: Callable[[IntegrityError], object] | None = None  # called for a damaged manifest that is skipped
    on_passed: Callable[[str], object] = str  # called for each newer save that is not taken, with the reason

    def takes(self, found: Pinned) -> bool:
        return found.digest not in self.without

    def pass_over(self, error: IntegrityError) -> None:
        """Report a damaged manifest to `on_damaged`, or raise the error without it."""
        if self.on_damaged is None:
            raise error
        self.on_damaged(error)
