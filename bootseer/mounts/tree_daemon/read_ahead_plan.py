"""The pieces of files that the hot blocks of a tree are. Pure.

In: the index object of a tree, which was verified before, and its hot blocks in order. Out: for some blocks, the
reads of a program that reads them through the mount.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from bootseer.errors import IntegrityError
from bootseer.tree.compression import decompress
from bootseer.tree.index import BLOCK_BYTES, BLOCK_UNITS, HOLE, MAX_RAW_INDEX_BYTES


class Piece(NamedTuple):
    """A part of a file, at most BLOCK_BYTES: the kernel reads no more than so much ahead."""

    path: bytes  # from the tree's root
    offset: int  # bytes
    length: int  # bytes


class _Files(msgspec.Struct):
    """The part of an index that locates files."""

    parents: list[int]
    names: list[bytes]
    modes: list[int]
    sizes: list[int]
    runs: list[list[int]]
    links: list[int]


class HotPieces:
    """Pieces of the hot blocks of one tree."""

    def __init__(self, index_bytes: bytes, digest: str, hot: Sequence[int]) -> None:
        """Args: index_bytes: the index object, as it is stored. Raises: IntegrityError."""
        where = f"the index of {digest}"
        try:
            self._files = msgspec.msgpack.decode(decompress(index_bytes, MAX_RAW_INDEX_BYTES, where), type=_Files)
        except msgspec.MsgspecError as error:
            raise IntegrityError(f"{where}: {error}") from error
        self._paths = {0: b""}
        self._pieces: dict[int, list[tuple[int, int, int]]] = {number: [] for number in hot}
        self._find()

    def of(self, blocks: Iterable[int]) -> list[Piece]:
        """Return the pieces in these blocks, in their order; each lies in one of them."""
        return [
            Piece(self._path(entry), offset, length)
            for number in blocks
            for entry, offset, length in self._pieces.get(number, ())
        ]

    def _find(self) -> None:
        files, pieces = self._files, self._pieces
        for entry, (mode, link, runs, size) in enumerate(
            zip(files.modes, files.links, files.runs, files.sizes, strict=True)
        ):
            if link != -1 or not stat.S_ISREG(mode):
                continue
            offset = 0
            for place in range(0, len(runs), 2):
                address, count = runs[place], runs[place + 1]
                if address != HOLE:
                    for number in range(count):
                        block = address // BLOCK_UNITS + number
                        if block in pieces:
                            begin = offset + number * BLOCK_BYTES
                            pieces[block].append((entry, begin, min(BLOCK_BYTES, size - begin)))
                offset += count * BLOCK_BYTES

    def _path(self, entry: int) -> bytes:
        known = self._paths.get(entry)
        if known is None:
            above = self._path(self._files.parents[entry])
            name = self._files.names[entry]
            known = self._paths[entry] = above + b"/" + name if above else name
        return known
