"""Builds a tree from what a source finds: files in memory as inodes, data as pieces in a packer, then the index.

In: a source (a folder, layers of an image) and a sink for packs. Out: the index as it is stored, its digest, and
figures. The same input, version and zstd give the same bytes: nothing here knows the time or the order of a disk.
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
from bootseer.tree.index import (
    BLOCK,
    BLOCK_BYTES,
    BLOCK_UNITS,
    HOLE,
    MOST_INDEX_BYTES,
    MOST_PIECES,
    MOST_RAW_INDEX_BYTES,
    MOST_TIME_NS,
    UNIT_BYTES,
    Config,
    Index,
    digest_of,
    encode,
)
from bootseer.tree.inodes import Inode
from bootseer.tree.packing import Packed, Packer, Put

Progress = Callable[[int, int], object]  # bytes and files since the last call, from the thread that builds


class Contents(NamedTuple):
    """What a source found."""

    root: Inode  # a folder
    config: Config = Config()
    left_out: Mapping[str, int] = MappingProxyType({})  # what cannot be kept, and how often


class Source(Protocol):
    """Something to build a tree from."""

    name: str  # without secrets; stands in the index

    def read(self, packer: Packer, hot_paths: Sequence[bytes], on_progress: Progress) -> Contents:
        """Finds everything; gives data to `packer` in the order in which it is to lie, `hot_paths` first."""


class Statistics(NamedTuple):
    """Of a tree that was built."""

    entries: int
    files: int  # regular ones, each once whatever names it has
    raw_bytes: int  # of files, with their holes
    stored_bytes: int  # of packs
    blocks: int
    deduplicated_bytes: int  # of pieces that were there already
    hole_bytes: int
    unused_bytes: int  # stored, and of no file: layers wrote a file twice
    left_out: Mapping[str, int]  # what could not be kept, and how often


class BuiltTree(NamedTuple):
    """The packs are with the sink; with the index stored as well the tree is complete."""

    tree: Index
    index_bytes: bytes  # as they are stored
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
    """Builds the tree of a source.

    Args: `put(digest, data)` stores a pack under its digest; it is called from threads, several times at once, and
    may be slow. `hot_paths`: files, as paths below the root, whose data is to come first, in this order. `codec`:
    of blocks; the index is always zstd.
    Raises: what the source and `put` raise; IntegrityError for a tree that no reader would take.
    """
    for path in hot_paths:
        if path.startswith(b"/") or any(name in (b"", b".", b"..") for name in path.split(b"/")):
            raise ConfigError(f"{path!r} is no path of a file in the tree: names with '/' between them")
    with Packer(put, threads=threads, codec=codec) as packer:
        contents = source.read(packer, hot_paths, on_progress or _ignore)
        packed = packer.finish()
    index = lay_out(contents, packed, source.name, codec)
    raw = encode(index)
    index_bytes = compression.compress(raw)
    if len(raw) > MOST_RAW_INDEX_BYTES or len(index_bytes) > MOST_INDEX_BYTES:
        sizes = f"{len(raw)} bytes, {len(index_bytes)} when compressed"
        raise ConfigError(f"{source.name or 'this tree'}: has an index of {sizes}: make two smaller trees of it")
    return BuiltTree(index, index_bytes, digest_of(index_bytes), _statistics(index, contents, packed))


def tool(codec: Codec = "zstd") -> str:
    """What decides the bytes of a tree."""
    versions = dict.fromkeys((compression.version(), block_codec.version(codec)))
    return f"bootseer {__version__}, {', '.join(versions)}"


def lay_out(contents: Contents, packed: Packed, source: str, codec: Codec = "zstd") -> Index:
    """The index: all names of a folder one after the other, then what is in its folders."""
    inodes, parents, names = [contents.root], [0], [b""]
    open_folders = [0]
    while open_folders:
        folder = open_folders.pop()
        children = inodes[folder].children or {}
        below = []
        for name in sorted(children):
            if children[name].children is not None:
                below.append(len(inodes))
            inodes.append(children[name])
            parents.append(folder)
            names.append(name)
        open_folders += reversed(below)
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
        mtimes_ns=[max(-MOST_TIME_NS, min(inode.mtime_ns, MOST_TIME_NS)) for inode in inodes],
        sizes=[inode.size for inode in inodes],
        runs=runs,
        targets=[inode.target for inode in inodes],
        links=links,
        rdevs={entry: inode.rdev for entry, inode in enumerate(inodes) if inode.rdev is not None},
        xattrs={entry: inode.xattrs for entry, inode in enumerate(inodes) if inode.xattrs and links[entry] == -1},
        opaque=[entry for entry, inode in enumerate(inodes) if inode.is_opaque],
    )


def piece_count(size: int, where: str) -> int:
    """Pieces of a file; raises ConfigError for one that no tree can hold."""
    count = -(-size // BLOCK_BYTES)
    if count > MOST_PIECES:
        raise ConfigError(f"{where}: {size} bytes; a tree holds at most {MOST_PIECES * BLOCK_BYTES}")
    return count


def _statistics(index: Index, contents: Contents, packed: Packed) -> Statistics:
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
