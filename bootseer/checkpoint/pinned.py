"""A version of a checkpoint that was chosen, and what the choice depends on. PURE: records."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Collection
from typing import NamedTuple

from bootseer.checkpoint import manifest as stored
from bootseer.checkpoint.direct import StoredFile
from bootseer.errors import CheckpointError, IntegrityError

STRIPED, PLAIN = "striped", "plain"


class Pinned(NamedTuple):
    """One complete version. Stripe paths of `files` are relative to the store's root."""

    kind: str  # STRIPED or PLAIN
    folder: str  # in the store: of the version, of the plain checkpoint, or above a single file
    # Of a striped one its version; of what lies in a single save's folder the path below what was asked for
    # ("step-10", "step-10/v-<version>"); "" for a plain one that was asked for itself.
    version: str
    digest: str  # SHA-256, hex
    files: tuple[StoredFile, ...]
    step: int | None = None

    @property
    def striped_version(self) -> str:
        """The version's own name, "" for a plain checkpoint."""
        return posixpath.basename(self.version).removeprefix(stored.FOLDER_PREFIX) if self.kind == STRIPED else ""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.layout.size for file in self.files)


class NoneComplete(CheckpointError):  # noqa: N818  named as the others of the tree
    """There is something, but no complete checkpoint."""


class Wanted(NamedTuple):
    """Which versions count."""

    without: Collection[str] = ()  # digests of versions that cannot be loaded: older ones are taken
    is_striped: bool = False
    on_damaged: Callable[[IntegrityError], object] | None = None  # told of a damaged manifest that is passed over
    on_passed: Callable[[str], object] = str  # told of each newer save that is not taken, and why

    def takes(self, found: Pinned) -> bool:
        return found.digest not in self.without

    def pass_over(self, error: IntegrityError) -> None:
        """Raises the error unless somebody wants to hear of it."""
        if self.on_damaged is None:
            raise error
        self.on_damaged(error)
