"""The files of a generation as a tree: built from a node's files and the last tree, and unpacked in part.

Files are ordered by the generation that had them first, and generations share no blocks. So the packs of files
that stay are the same from one generation to the next, and are not written again.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from bootseer.env.compile_cache.collect import open_without_atime, read_canonical
from bootseer.env.compile_cache.document import CachedFile, CacheGeneration
from bootseer.env.compile_cache.kinds import is_group
from bootseer.env.compile_cache.merge import FoundFile
from bootseer.errors import IntegrityError, SourceChanged
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.builder.building import Progress, SourceContents
from bootseer.tree.builder.packing import TASK_BYTES, TASK_PIECES, Packer
from bootseer.tree.index import BLOCK_BYTES, BLOCK_UNITS, HOLE, UNIT_BYTES, Index
from bootseer.tree.inodes import Inode
from bootseer.tree.reading import BlockSource

_DIRECTORY_MODE = stat.S_IFDIR | 0o700


class LastTree(NamedTuple):
    tree: Index
    entries: Mapping[str, int]  # of its files, by path
    blocks: BlockSource


def entries_of(index: Index, generation: CacheGeneration, where: str) -> dict[str, int]:
    """Return the entry of each file of a generation.

    Raises: IntegrityError if the tree has another file at a path, or none.
    """
    paths = {
        os.fsdecode(index.path(entry)): entry
        for entry, mode in enumerate(index.modes)
        if stat.S_ISREG(mode) and index.links[entry] == -1
    }
    entries = {}
    for fact in generation.files:
        entry = paths.get(fact.path)
        if entry is None or (index.sizes[entry], index.mtimes_ns[entry]) != (fact.size, fact.mtime_ns):
            raise IntegrityError(f"{where}: the tree does not have {fact.path}, which its list names")
        entries[fact.path] = entry
    return entries


def select(index: Index, entries: Collection[int]) -> Index:
    """Return the tree of these regular files and their parents: for this user alone, without attributes."""
    wanted = set(entries)
    for entry in entries:
        above = entry
        while above:
            above = index.parents[above]
            wanted.add(above)
    kept = sorted(wanted | {0})
    places = {entry: place for place, entry in enumerate(kept)}
    return msgspec.structs.replace(
        index,
        parents=[places[index.parents[entry]] for entry in kept],
        names=[index.names[entry] for entry in kept],
        modes=[_mode(index.modes[entry]) for entry in kept],
        uids=[0] * len(kept),
        gids=[0] * len(kept),
        mtimes_ns=[index.mtimes_ns[entry] for entry in kept],
        sizes=[index.sizes[entry] for entry in kept],
        runs=[index.runs[entry] for entry in kept],
        targets=[b""] * len(kept),
        links=[-1] * len(kept),
        rdevs={},
        xattrs={},
        opaque=[],
    )


def _mode(mode: int) -> int:
    if stat.S_ISDIR(mode):
        return _DIRECTORY_MODE
    return stat.S_IFREG | (0o700 if mode & 0o100 else 0o600)


class _Part(NamedTuple):
    """Consecutive pieces of a file."""

    fact: CachedFile
    first: int
    pieces: int


class MergedFiles:
    """A source for `bootseer.tree.builder.building.build`: the files of a new generation.

    `ours`: by path, the files whose bytes are on this node. All others are in `last`.
    """

    name = ""  # the same files give the same tree

    def __init__(self, files: Sequence[CachedFile], ours: Mapping[str, FoundFile], last: LastTree | None) -> None:
        self._files = sorted(files, key=lambda fact: (fact.since, fact.path))
        self._ours = ours
        self._last = last

    def read(self, packer: Packer, hot_paths: Sequence[bytes], on_progress: Progress) -> SourceContents:
        """Implement `Source`. Raises: SourceChanged for a file that has changed since; StorageError."""
        del hot_paths  # all files are needed at once
        root = Inode(_DIRECTORY_MODE)
        tasks = _Tasks(packer, self._read, on_progress)
        since = 0
        for fact in self._files:
            if fact.since != since:
                tasks.end()
                packer.end_blocks()
                since = fact.since
            tasks.add(fact, self._make(root, fact))
        tasks.end()
        return SourceContents(root)

    def _make(self, root: Inode, fact: CachedFile) -> Inode:
        *directories, name = os.fsencode(fact.path).split(b"/")
        above = root
        for directory in directories:
            assert above.children is not None
            above = above.children.setdefault(directory, Inode(_DIRECTORY_MODE))
        assert above.children is not None
        # Libraries are executable. The modes of the node's files are not taken over.
        inode = Inode(stat.S_IFREG | (0o700 if fact.path.endswith(".so") else 0o600), mtime_ns=fact.mtime_ns)
        inode.size = fact.size
        above.children[name] = inode
        return inode

    def _read(self, parts: Sequence[_Part]) -> list[bytes]:
        """Read parts of files, in a thread of the packer."""
        pieces: list[bytes] = []
        for part in parts:
            found = self._ours.get(part.fact.path)
            if found is not None:
                pieces += _read_here(found, part)
            else:
                assert self._last is not None, "merge() decides the source of the bytes"
                pieces += read_pieces(self._last, part.fact.path, part.first, part.pieces)
        return pieces


class _Tasks:
    """Groups parts of files into tasks for the packer's threads."""

    def __init__(
        self, packer: Packer, read: Callable[[Sequence[_Part]], list[bytes]], on_progress: Progress
    ) -> None:
        self._packer = packer
        self._read = read
        self._on_progress = on_progress
        self._parts: list[_Part] = []
        self._bytes = self._count = self._files = 0

    def add(self, fact: CachedFile, inode: Inode) -> None:
        pieces = -(-fact.size // BLOCK_BYTES)
        first = 0
        while first < pieces:
            count = min(pieces - first, TASK_PIECES - self._count, max(1, TASK_BYTES // BLOCK_BYTES))
            inode.add_pieces(self._packer.count + self._count, count)
            self._parts.append(_Part(fact, first, count))
            self._count += count
            self._bytes += min(count * BLOCK_BYTES, fact.size - first * BLOCK_BYTES)
            first += count
            if self._count >= TASK_PIECES or self._bytes >= TASK_BYTES:
                self.end()
        self._files += 1

    def end(self) -> None:
        if self._parts:
            self._packer.add_later(self._count, partial(self._read, self._parts))
        self._on_progress(self._bytes, self._files)
        self._parts = []
        self._bytes = self._count = self._files = 0


def _read_here(found: FoundFile, part: _Part) -> list[bytes]:
    begin = part.first * BLOCK_BYTES
    with map_os_errors(found.source):
        if is_group(found.path):
            data = read_canonical(found.source, found.path)
            if hashlib.sha256(data).hexdigest() != found.sha256:
                raise _changed(found)
            data = data[begin : begin + part.pieces * BLOCK_BYTES]
        else:
            try:
                fd = open_without_atime(found.source)
            except FileNotFoundError as error:
                raise _changed(found) from error
            try:
                data = _pread(fd, min(part.pieces * BLOCK_BYTES, found.size - begin), begin)
                status = os.fstat(fd)
                if (status.st_size, status.st_mtime_ns) != (found.size, found.mtime_ns):
                    raise _changed(found)
            finally:
                os.close(fd)
    pieces = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    if len(pieces) != part.pieces:
        raise _changed(found)
    return pieces


def _pread(fd: int, length: int, offset: int) -> bytes:
    data = b""
    while len(data) < length and (more := os.pread(fd, length - len(data), offset + len(data))):
        data += more
    return data


def _changed(found: FoundFile) -> SourceChanged:
    return SourceChanged(f"{found.source}: changed while it was read; the next capture publishes it")


def read_pieces(tree: LastTree, path: str, first: int, count: int) -> list[bytes]:
    """Read pieces of a file of a tree, verified. Raises: StorageError, IntegrityError."""
    entry = tree.entries[path]
    wanted = list(tree.tree.pieces(entry))[first : first + count]
    numbers = sorted({address // BLOCK_UNITS for _, address, _ in wanted if address != HOLE})
    blocks = dict(tree.blocks.read_blocks(numbers))
    pieces = []
    for _, address, length in wanted:
        if address == HOLE:
            pieces.append(bytes(length))
        else:
            at = address % BLOCK_UNITS * UNIT_BYTES
            pieces.append(bytes(blocks[address // BLOCK_UNITS][at : at + length]))
    return pieces
