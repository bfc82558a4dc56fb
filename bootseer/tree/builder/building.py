"""Builder of trees: files of a source become inodes, their data pieces in a packer; then it makes the index.

In: a source (a directory, layers of an image) and a sink for packs. Out: the stored index, its digest, and
statistics. The same input, version and zstd give the same bytes: neither time nor the order of a disk matters.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

from bootseer import __version__
from bootseer.errors import ConfigError
from bootseer.tree import block_codec, compression
from bootseer.tree.block_codec import Codec
from bootseer.tree.builder.packing import PackedPieces, Packer, Put
from bootseer.tree.index import (
    BLOCK,
    BLOCK_BYTES,
    BLOCK_UNITS,
    HOLE,
    MAX_INDEX_BYTES,
    MAX_PIECES,
    MAX_RAW_INDEX_BYTES,
    MAX_TIME_NS,
    UNIT_BYTES,
    Config,
    Index,
    digest_of,
    encode,
)
from bootseer.tree.inodes import Inode

Progress = Callable[[int, int], object]  # bytes and files since the last call, from the building thread


class SourceContents(NamedTuple):
    root: Inode  # a directory
    config: Config = Config()
    left_out: Mapping[str, int] = MappingProxyType({})  # what a tree cannot contain, and how often


class Source(Protocol):
    """A source of the files of a tree."""

    name: str  # without secrets; stored in the index

    def read(self, packer: Packer, hot_paths: Sequence[bytes], on_progress: Progress) -> SourceContents:
        """Find all files; add data to `packer` in its final order, `hot_paths` first."""


class Statistics(NamedTuple):
    """Statistics of a built tree."""

    entries: int
    files: int  # regular ones, each once regardless of its number of names
    raw_bytes: int  # of files, with their holes
    stored_bytes: int  # of packs
    blocks: int
    deduplicated_bytes: int  # of pieces that already existed
    hole_bytes: int
    unused_bytes: int  # stored, but of no file: layers wrote a file twice
    left_out: Mapping[str, int]  # what the tree cannot contain, and how often


class BuiltTree(NamedTuple):
    """A built tree. The sink has the packs; storing the index completes it."""

    tree: Index
    index_bytes: bytes  # as stored
    digest: str  # of the tree
    statistics: Statistics


def build(
    source: Source,
    put: Put,
    *,
    hot_paths: Sequence[bytes] = (),
    codec: Codec = "zstd",
    threads: int | None = None,
    on_progress: Progress | None = None,
) -> BuiltTree:
    """Build the tree of a source.

    Args: `put(digest, data)` stores a pack under its digest; several threads call it at once, and it may be slow.
    `hot_paths`: files, as paths below the root, whose data comes first, in this order. `codec`: of blocks; the
    index always uses zstd.
    Raises: errors of the source and of `put`; IntegrityError for a tree that no reader would accept.
    """
    for path in hot_paths:
        if path.startswith(b"/") or any(name in (b"", b".", b"..") for name in path.split(b"/")):
            raise ConfigError(f"{path!r} is not a path of a file in the tree: names with '/' between them")
    with Packer(put, threads=threads, codec=codec) as packer:
        contents = source.read(packer, hot_paths, on_progress or _ignore)
        packed = packer.finish()
    index = lay_out(contents, packed, source.name, codec)
    raw = encode(index)
    index_bytes = compression.compress(raw)
    if len(raw) > MAX_RAW_INDEX_BYTES or len(index_bytes) > MAX_INDEX_BYTES:
        sizes = f"{len(raw)} bytes, {len(index_bytes)} when compressed"
        raise ConfigError(f"{source.name or 'this tree'}: has an index of {sizes}: split it into two trees")
    return BuiltTree(index, index_bytes, digest_of(index_bytes), _statistics(index, contents, packed))


def tool(codec: Codec = "zstd") -> str:
    """Return the versions that determine the bytes of a tree."""
    versions = dict.fromkeys((compression.version(), block_codec.version(codec)))
    return f"bootseer {__version__}, {', '.join(versions)}"


def lay_out(contents: SourceContents, packed: PackedPieces, source: str, codec: Codec = "zstd") -> Index:
    """Make the index: the names of a directory are adjacent, then follow the contents of its subdirectories."""
    inodes, parents, names = [contents.root], [0], [b""]
    open_directories = [0]
    while open_directories:
        directory = open_directories.pop()
        children = inodes[directory].children or {}
        below = []
        for name in sorted(children):
            if children[name].children is not None:
                below.append(len(inodes))
            inodes.append(children[name])
            parents.append(directory)
            names.append(name)
        open_directories += reversed(below)
    links, runs = [], []
    first: dict[int, int] = {}  # identity of an inode -> its first entry
    for entry, inode in enumerate(inodes):
        link = first.setdefault(id(inode), entry)
        links.append(-1 if link == entry else link)
        runs.append(inode.runs(packed.addresses) if link == entry else [])
    return Index(
        tool=tool(codec),
        source=source,
        config=contents.config,
        packs=packed.packs,
        blocks=packed.blocks,
        parents=parents,
        names=names,
        modes=[inode.mode for inode in inodes],
        uids=[inode.uid for inode in inodes],
        gids=[inode.gid for inode in inodes],
        mtimes_ns=[max(-MAX_TIME_NS, min(inode.mtime_ns, MAX_TIME_NS)) for inode in inodes],
        sizes=[inode.size for inode in inodes],
        runs=runs,
        targets=[inode.target for inode in inodes],
        links=links,
        rdevs={entry: inode.rdev for entry, inode in enumerate(inodes) if inode.rdev is not None},
        xattrs={entry: inode.xattrs for entry, inode in enumerate(inodes) if inode.xattrs and links[entry] == -1},
        opaque=[entry for entry, inode in enumerate(inodes) if inode.is_opaque],
    )


def piece_count(size: int, where: str) -> int:
    """Return the number of pieces of a file. Raises: ConfigError for a file that no tree can hold."""
    count = -(-size // BLOCK_BYTES)
    if count > MAX_PIECES:
        raise ConfigError(f"{where}: {size} bytes; a tree holds at most {MAX_PIECES * BLOCK_BYTES}")
    return count


def _statistics(index: Index, contents: SourceContents, packed: PackedPieces) -> Statistics:
    files = raw_bytes = hole_bytes = 0
    used = bytearray(index.block_count * BLOCK_UNITS)
    for entry, (mode, link) in enumerate(zip(index.modes, index.links, strict=True)):
        if link != -1 or not stat.S_ISREG(mode):
            continue
        files += 1
        raw_bytes += index.sizes[entry]
        runs, offset = index.runs[entry], 0
        for place in range(0, len(runs), 2):
            address, count = runs[place], runs[place + 1]
            length = min(count * BLOCK_BYTES, index.sizes[entry] - offset)
            offset += length
            if address == HOLE:
                hole_bytes += length
            else:
                units = -(-length // UNIT_BYTES)
                used[address : address + units] = b"\1" * units
    stored_units = sum(raw for *_, raw in BLOCK.iter_unpack(index.blocks)) // UNIT_BYTES
    return Statistics(
        entries=len(index),
        files=files,
        raw_bytes=raw_bytes,
        stored_bytes=index.stored_bytes,
        blocks=index.block_count,
        deduplicated_bytes=packed.deduplicated_bytes,
        hole_bytes=hole_bytes,
        unused_bytes=(stored_units - used.count(1)) * UNIT_BYTES,
        left_out=contents.left_out,
    )


def _ignore(_bytes: int, _files: int) -> None:
    pass
