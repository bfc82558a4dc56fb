"""EROFS metadata for a tree, so that the kernel shows it: inodes, folders and where data lies on the device.

In: a checked Index. Out: the bytes of an image without data, to be mounted with `device=` naming the device that
all blocks form. Uncompressed and chunk-indexed, one external device, nothing else. It is made on the node that
mounts it, from the verified index, so the kernel parses nothing foreign. The same index gives the same bytes.

erofs_format.py has what it looks like on disk; mkfs.erofs and fsck.erofs are the oracles of its tests.
"""

from __future__ import annotations

import stat
import sys
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress, groupby, islice, repeat
from mmap import mmap
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from bootseer.tree.erofs_format import (
    CHUNK,
    CHUNK_FORMAT,
    CHUNKED,
    CHUNKS,
    DEVICE_SLOT,
    DEVICES,
    DIRENT,
    FILE,
    FILE_TYPES,
    FOLDER,
    INLINE,
    INODE,
    INODE_BYTES,
    LINK,
    MAGIC,
    MOST_INLINE,
    MTIME,
    NID_BYTES,
    NO_ADDRESS,
    NS,
    OPAQUE,
    PLAIN,
    ROOT_OFFSET,
    SLOT,
    SLOT_BYTES,
    SUPER,
    SUPER_OFFSET,
    XATTR_HEADER_BYTES,
    addresses_of,
    device_number,
    encode_xattrs,
    up,
)
from bootseer.tree.index import BLOCK_UNITS, HOLE, UNIT_BYTES, Index

VERSION = 3  # of what is made from an index; another one is another file in the cache
_SINGLE_BYTES = 96  # of an inode and one piece, in whole NID_BYTES

MOST_FIRST = 64  # entries of the root that are not in one piece; where there are more, nothing comes first

T = TypeVar("T")
Memory: TypeAlias = "bytearray | mmap"


def metadata(index: Index, digest: str) -> bytearray:
    """The image of a tree with this digest; a multiple of 4096 bytes."""
    making = Making(index, digest)
    data = bytearray(making.size)
    making.write_first(data)
    making.write_rest(data)
    return data


class Making:
    """An image whose places are known; its bytes are put into memory of the caller's, full of zeros, in two steps.

    `size`: of the image; `first_bytes`: of it, what `write_first` completes: all that a mount reads, the root and
    the folders in it. Both are multiples of 4096.
    """

    def __init__(self, index: Index, digest: str) -> None:
        self._writer = _Writer(index)
        self._uuid = bytes.fromhex(digest)[:16]
        self.size, self.first_bytes = self._writer.lay_out()

    def write_first(self, data: Memory) -> None:
        self._writer.write_first(data, self._uuid)

    def write_rest(self, data: Memory) -> None:
        self._writer.write_rest(data)


class _Folder(NamedTuple):
    """What a folder holds: its entries, then their names with the two that each folder has, sorted."""

    children: Sequence[int]  # entries; a range where they follow each other
    names: list[bytes]
    one: int  # place of "."
    two: int  # place of ".."
    starts: list[int]  # places where blocks begin
    last_bytes: int  # in the last block


class _Writer:
    """Where everything lies, then its bytes. E entries.

    Nearly all entries are files in one piece. Their inodes lie one after the other, each with its piece behind it,
    equally far apart: so they are written column by column, many times faster than one by one.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        count = len(index)
        types = {mode: FILE_TYPES[stat.S_IFMT(mode)] for mode in set(index.modes)}
        self._types = bytearray(map(types.__getitem__, index.modes))  # E
        self._nlinks = [1] * count
        self._xattrs: dict[int, bytes] = {}  # as they follow the inode
        self._folders: dict[int, _Folder] = {}
        self._sizes = list(index.sizes)
        self._addresses: list[int] = []  # E: of those in one piece; else HOLE
        self._nids = [0] * count  # E: of the inode, in NID_BYTES
        self._singles_at = 0  # where inodes of those in one piece begin, bytes
        self._others: list[int] = []  # entries with inodes that are not those, but for the root
        self._blocks: dict[int, int] = {}  # entry -> first block of its own
        self._inline: dict[int, int] = {}  # entry -> bytes that follow its inode
        self._end_block = 0
        self._first: list[int] = []  # of `_others`, what lies right behind the root

    def lay_out(self) -> tuple[int, int]:
        """Bytes of all, and of what comes first."""
        self._gather()
        first_bytes = self._place()
        return self._end_block * UNIT_BYTES, first_bytes

    def write_first(self, data: Memory, uuid: bytes) -> None:
        self._write_super(data, uuid)
        for entry in (0, *self._first):
            self._write_inode(data, entry)
            if entry in self._folders:
                self._write_folder(data, entry)

    def write_rest(self, data: Memory) -> None:
        self._write_singles(data)
        for entry in self._others[len(self._first) :]:
            self._write_inode(data, entry)
        for entry in self._folders.keys() - {0, *self._first}:
            self._write_folder(data, entry)

    # ---- what there is -------------------------------------------------------------------------------------

    def _gather(self) -> None:
        index = self._index
        links, nlinks, sizes, types = index.links, self._nlinks, self._sizes, self._types
        for entry, pairs in index.xattrs.items():
            self._xattrs[entry] = encode_xattrs(pairs)
        for entry in index.opaque:
            pairs = [pair for pair in index.xattrs.get(entry, []) if pair[0] != OPAQUE[0]]
            self._xattrs[entry] = encode_xattrs([*pairs, OPAQUE])
        self._addresses = [runs[0] if len(runs) == 2 and runs[1] == 1 else HOLE for runs in index.runs]
        for entry in self._xattrs:
            self._addresses[entry] = HOLE
        self._others = [entry for entry, address in enumerate(self._addresses) if address == HOLE]
        if links.count(-1) != len(links):
            for entry in self._others:
                if links[entry] != -1:
                    nlinks[links[entry]] += 1
            self._others = [entry for entry in self._others if links[entry] == -1]
        grouped = _group(index.parents)
        for entry in self._others:
            kind = types[entry]
            if kind == FOLDER:
                folder = self._folders[entry] = self._folder(grouped.get(entry, range(0)))
                nlinks[entry] = 2 + bytes(_take(types, folder.children)).count(FOLDER)
                sizes[entry] = (len(folder.starts) - 1) * UNIT_BYTES + folder.last_bytes
            elif kind == LINK:
                sizes[entry] = len(index.targets[entry])
        del self._others[0]
        first = [entry for entry in grouped.get(0, ()) if self._addresses[entry] == HOLE and links[entry] == -1]
        if len(first) <= MOST_FIRST:
            self._first = first
            chosen = set(first)
            self._others = first + [entry for entry in self._others if entry not in chosen]

    def _folder(self, children: Sequence[int]) -> _Folder:
        """Names of a folder, which are sorted already, cut into blocks."""
        names = list(_take(self._index.names, children))
        if not names or names[0] > b"..":  # nearly always
            names[:0] = (b".", b"..")
            one, two = 0, 1
        else:
            one = bisect_left(names, b".")
            names.insert(one, b".")
            two = bisect_left(names, b"..")
            names.insert(two, b"..")
        used = len(names) * DIRENT.size + len(b"".join(names))
        starts = [0]
        if used > UNIT_BYTES:
            used = 0
            for place, name in enumerate(names):
                needed = DIRENT.size + len(name)
                if used + needed > UNIT_BYTES:
                    starts.append(place)
                    used = 0
                used += needed
        return _Folder(children, names, one, two, starts, used)

    # ---- where it lies -------------------------------------------------------------------------------------

    def _place(self) -> int:
        """The root first, as its number has 16 bits, with what it has of folders and the like; those in one piece,
        all other inodes, then whole blocks. Returns: bytes of what comes first.
        """
        nids, links = self._nids, self._index.links
        in_blocks: list[int] = []
        at = ROOT_OFFSET
        for entry in (0, *self._first):
            at = self._place_inode(entry, at, in_blocks)
        first_bytes = up(at, UNIT_BYTES)
        if len(self._first) + 1 < len(self._addresses):
            at = self._singles_at = first_bytes
        nid = at // NID_BYTES
        for entry, address in enumerate(self._addresses):
            if address != HOLE:
                nids[entry] = nid
                nid += _SINGLE_BYTES // NID_BYTES
        at = max(at, nid * NID_BYTES)
        for entry in self._others[len(self._first) :]:
            at = self._place_inode(entry, at, in_blocks)
        if links.count(-1) != len(links):
            for entry, link in enumerate(links):
                if link != -1:
                    nids[entry] = nids[link]
        # fsck.erofs reads where attributes would begin, also behind a last inode that has none.
        block = -(-(at + XATTR_HEADER_BYTES) // UNIT_BYTES)
        for entry in in_blocks:
            self._blocks[entry] = block
            block += -(-(self._sizes[entry] - self._inline.get(entry, 0)) // UNIT_BYTES)
        self._end_block = block
        return first_bytes

    def _place_inode(self, entry: int, at: int, in_blocks: list[int]) -> int:
        """Of one that is at `at` or soon after: where the next one may be. `in_blocks` gets those with blocks."""
        head = INODE_BYTES + len(self._xattrs.get(entry, b""))
        kind, size = self._types[entry], self._sizes[entry]
        if kind == FILE and size:
            pieces = sum(self._index.runs[entry][1::2])
            head = up(at + head, CHUNK.size) - at + pieces * CHUNK.size
        elif kind in (FOLDER, LINK):
            tail = size % UNIT_BYTES
            if 0 < tail <= MOST_INLINE:
                self._inline[entry] = tail
                if (at + head) % UNIT_BYTES + tail > UNIT_BYTES:  # it may not lie in two blocks
                    at = up(up(at + head, UNIT_BYTES) - head, NID_BYTES)
                head += tail
            if size > self._inline.get(entry, 0):
                in_blocks.append(entry)
        self._nids[entry] = at // NID_BYTES
        return up(at + head, NID_BYTES)

    # ---- its bytes -----------------------------------------------------------------------------------------

    def _write_super(self, data: Memory, uuid: bytes) -> None:
        index = self._index
        inodes = index.links.count(-1)
        SUPER.pack_into(
            data, SUPER_OFFSET, MAGIC, 0, MTIME, UNIT_BYTES.bit_length() - 1, 0, ROOT_OFFSET // NID_BYTES, inodes,
            0, 0, self._end_block, 0, 0, uuid, b"bootseer", CHUNKED | DEVICES, 0, 1, DEVICE_SLOT, 0, 0, 0, 0, 0,
        )  # fmt: skip
        SLOT.pack_into(data, DEVICE_SLOT * SLOT_BYTES, b"", index.block_count * BLOCK_UNITS, 0)

    def _write_singles(self, data: Memory) -> None:
        """Those in one piece: what all have alike, then column by column."""
        index = self._index
        is_single = [address != HOLE for address in self._addresses]
        count = sum(is_single)
        if not count:
            return
        alike = bytearray(_SINGLE_BYTES)
        INODE.pack_into(
            alike, 0, 1 | CHUNKS << 1, 0, 0, 0, 0, CHUNK_FORMAT, 0, index.uids[0], index.gids[0], 0, 0, 1
        )
        CHUNK.pack_into(alike, INODE_BYTES, 0, 1, 0)
        end = self._singles_at + count * _SINGLE_BYTES
        with memoryview(data)[self._singles_at : end] as view, view.cast("I") as words:
            for place, word in enumerate(memoryview(alike).cast("I")):
                if word:
                    words[place :: _SINGLE_BYTES // 4] = memoryview(array("I", [word]) * count)

            def put(offset: int, column: Iterable[int]) -> None:
                words[offset // 4 :: _SINGLE_BYTES // 4] = _words("I", compress(column, is_single))

            put(4, index.modes)
            put(8, index.sizes)  # of 8 bytes; these have no more than a block
            put(20, range(1, len(index) + 1))
            for offset, owners in ((24, index.uids), (28, index.gids)):
                if owners.count(owners[0]) != len(owners):
                    put(offset, owners)
            times = list(compress(index.mtimes_ns, is_single))
            seconds = _words("q", [time_ns // NS for time_ns in times])
            words[32 // 4 :: _SINGLE_BYTES // 4] = seconds[0::2]
            words[36 // 4 :: _SINGLE_BYTES // 4] = seconds[1::2]
            words[40 // 4 :: _SINGLE_BYTES // 4] = _words("I", [time_ns % NS for time_ns in times])
            if index.links.count(-1) != len(index.links):
                put(44, self._nlinks)
            put(INODE_BYTES + 4, self._addresses)

    def _write_inode(self, data: Memory, entry: int) -> None:
        index = self._index
        at = self._nids[entry] * NID_BYTES
        attributes = self._xattrs.get(entry, b"")
        runs, target = index.runs[entry], index.targets[entry]
        layout, where = PLAIN, 0
        end = at + INODE_BYTES + len(attributes)
        if runs:
            layout, where = CHUNKS, CHUNK_FORMAT
            end = up(end, CHUNK.size)
            for address in addresses_of(runs):
                if address == HOLE:
                    CHUNK.pack_into(data, end, 0xFFFF, 0, NO_ADDRESS)
                else:
                    CHUNK.pack_into(data, end, 0, 1, address)
                end += CHUNK.size
        elif entry in index.rdevs:
            where = device_number(*index.rdevs[entry])
        else:
            inline = self._inline.get(entry, 0)
            layout = INLINE if inline else PLAIN
            where = self._blocks.get(entry, 0)
            if target:
                start = end if inline else where * UNIT_BYTES
                data[start : start + len(target)] = target
        count = (len(attributes) - XATTR_HEADER_BYTES) // 4 + 1 if attributes else 0
        seconds, ns = divmod(index.mtimes_ns[entry], NS)
        INODE.pack_into(
            data, at, 1 | layout << 1, count, index.modes[entry], 0, self._sizes[entry], where, entry + 1,
            index.uids[entry], index.gids[entry], seconds, ns, self._nlinks[entry],
        )  # fmt: skip
        if attributes:
            data[at + INODE_BYTES : at + INODE_BYTES + len(attributes)] = attributes

    def _write_folder(self, data: Memory, entry: int) -> None:
        nids, pack = self._nids, DIRENT.pack
        children, names, one, two, starts, _ = self._folders[entry]
        numbers, kinds = list(_take(nids, children)), bytearray(_take(self._types, children))
        numbers.insert(one, nids[entry])
        numbers.insert(two, nids[self._index.parents[entry]])
        kinds.insert(one, FOLDER)
        kinds.insert(two, FOLDER)
        last = len(starts) - 1
        for number, start in enumerate(starts):
            if number == last and entry in self._inline:
                at = nids[entry] * NID_BYTES + INODE_BYTES + len(self._xattrs.get(entry, b""))
            else:
                at = (self._blocks[entry] + number) * UNIT_BYTES
            end = starts[number + 1] if number < last else len(names)
            some = names[start:end] if last else names
            offsets = accumulate(map(len, some), initial=len(some) * DIRENT.size)
            heads = map(pack, numbers[start:end], offsets, kinds[start:end], repeat(0))
            block = b"".join([*heads, *some])
            data[at : at + len(block)] = block


def _group(parents: list[int]) -> dict[int, Sequence[int]]:
    """Entries in each folder that has some, in their order; all of a folder mostly follow each other."""
    found: dict[int, Sequence[int]] = {}
    start = 1
    for parent, run in groupby(islice(parents, 1, None)):
        end = start + len(list(run))
        before = found.get(parent)
        if before is None:
            found[parent] = range(start, end)
        else:
            if not isinstance(before, list):
                before = found[parent] = list(before)
            before.extend(range(start, end))
        start = end
    return found


def _take(column: Sequence[T], entries: Sequence[int]) -> Iterable[T]:
    if isinstance(entries, range):
        return column[entries.start : entries.stop]
    return map(column.__getitem__, entries)


def _words(kind: Literal["I", "q"], numbers: Iterable[int]) -> memoryview:
    """Numbers ("I", "q") as words of 32 bits, the lower one first."""
    found = array(kind, list(numbers))
    if sys.byteorder == "big":
        found.byteswap()
    return memoryview(found).cast("B").cast("I")
