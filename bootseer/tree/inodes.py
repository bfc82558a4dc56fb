"""Inodes of a tree that is being built: attributes, and data as numbers of pieces. Pure."""

from __future__ import annotations

import stat
from array import array

from bootseer.tree.index import BLOCK_UNITS, HOLE


class Inode:
    """A file of any kind. A file with several names (hard links) is one object under all of them."""

    __slots__ = (
        "children", "extents", "gid", "is_opaque", "mode", "mtime_ns", "rdev", "size", "target", "uid", "xattrs",
    )  # fmt: skip

    def __init__(self, mode: int, uid: int = 0, gid: int = 0, mtime_ns: int = 0) -> None:
        self.mode = mode  # as st_mode
        self.uid = uid
        self.gid = gid
        self.mtime_ns = mtime_ns
        self.size = 0  # bytes, of a regular file
        self.extents: list[tuple[int, int]] = []  # number of the first piece, or HOLE, and count
        self.target = b""  # of a symbolic link
        self.rdev: tuple[int, int] | None = None  # of a device
        self.xattrs: list[tuple[bytes, bytes]] = []  # sorted by name
        self.is_opaque = False  # a directory that hides the contents of lower trees
        self.children: dict[bytes, Inode] | None = {} if stat.S_ISDIR(mode) else None

    def add_pieces(self, first: int, count: int) -> None:
        """Append data: `count` pieces from number `first` on, or holes."""
        if self.extents:
            last, length = self.extents[-1]
            if first == (HOLE if last == HOLE else last + length):
                self.extents[-1] = (last, length + count)
                return
        self.extents.append((first, count))

    def runs(self, addresses: array[int]) -> list[int]:
        """Return flat (address, pieces) pairs; adjacent whole blocks become one pair. `addresses`: by piece."""
        runs: list[int] = []
        for first, count in self.extents:
            if first == HOLE:
                _append(runs, HOLE, count)
            else:
                for address in addresses[first : first + count]:
                    _append(runs, address, 1)
        return runs


def _append(runs: list[int], address: int, count: int) -> None:
    if runs:
        last = runs[-2]
        goes_on = address != HOLE and last % BLOCK_UNITS == 0 and address == last + runs[-1] * BLOCK_UNITS
        if address == HOLE == last or (last != HOLE and goes_on):
            runs[-1] += count
            return
    runs += (address, count)
