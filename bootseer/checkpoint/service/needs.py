"""PURE: which bytes of a version a node's ranks need before it is known which rank reads which part."""

from __future__ import annotations

from typing import NamedTuple

from bootseer.checkpoint.format.doubles import find_duplicates
from bootseer.checkpoint.versions.pinned import Pinned

DCP_METADATA = ".metadata"


class Needs(NamedTuple):
    """A version, and what is known about its use."""

    pinned: Pinned
    must_be_whole: bool = False  # as requested, or because only links into memory are possible
    nodes: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether all of it is needed.

        False if other nodes need parts of it: for DCP directories, and for more than one file on several nodes.
        """
        if self.must_be_whole:
            return True
        if self.nodes > 1 and len(self.pinned.files) > 1:
            return False
        return not any(file.path.rpartition("/")[2] == DCP_METADATA for file in self.pinned.files)

    @property
    def spare(self) -> frozenset[str]:
        """Files that hold the same weights as others: they are read only when a rank opens them."""
        if self.must_be_whole:
            return frozenset()
        return find_duplicates([file.path for file in self.pinned.files])

    @property
    def bytes(self) -> int:
        """Bytes of all files but the spare ones."""
        spare = self.spare
        return sum(file.layout.size for file in self.pinned.files if file.path not in spare)
