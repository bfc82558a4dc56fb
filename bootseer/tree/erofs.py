"""EROFS metadata of a tree for the kernel: inodes, directories and data addresses on the device.

In: a checked Index. Out: the bytes of an image without data, to be mounted with `device=` for the device of all
blocks. It is uncompressed and chunk-indexed, with one external device. The mounting node makes it from the
verified index, so the kernel parses no foreign data. The same index gives the same bytes.

erofs_format.py defines the on-disk format; the tests compare with mkfs.erofs and fsck.erofs.
"""

from __future__ import annotations

import stat
import sys
from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, compress, groupby, islice, repeat
from mmap import mmap
from typing import Literal, NamedTuple, TypeAlias, TypeVar

from bootseer.errors import IntegrityError
from bootseer.tree.erofs_format import (
    CHUNK,
    CHUNK_FORMAT,
    CHUNKED,
    CHUNKS,
    DEVICE_SLOT,
    DEVICES,
    DIRECTORY,
    DIRENT,
    FILE,
    FILE_TYPES,
    INLINE,
    INODE,
    INODE_BYTES,
    LINK,
    MAGIC,
    MAX_INLINE,
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

VERSION = 4  # of the generated image; a new version uses another file in the cache
_FEW = 4
_SINGLE_BYTES = 96  # of an inode and one piece, in whole NID_BYTES

MAX_NEAR = 512  # entries that get blocks, so that directories can show them before their contents are known
MAX_FIRST = 64  # entries of the root that are not in one piece; with more, nothing comes first

T = TypeVar("T")
Memory: TypeAlias = "bytearray | mmap"


def metadata(index: Index, digest: str) -> bytearray:
    """Return the image of a tree with this digest; a multiple of 4096 bytes."""
    making = MetadataImage(index, digest)
    data = bytearray(making.max_bytes)
    making.write_first(data)
    del data[making.write_rest(data) :]
    return data


class MetadataImage:
    """An image that is written in two steps into zeroed memory of the caller.

    `max_bytes`: the maximum length of the image. `first_bytes`: the part that `write_first` completes, except for
    the number of blocks in the superblock. That part is all that a mount reads: the root and the directories in
    it. Both are multiples of 4096. A mount waits only for the first step, which processes few other entries.
    """

    def __init__(self, index: Index, digest: str) -> None:
        self._writer = _Writer(index)
        self._uuid = bytes.fromhex(digest)[:16]
        self.max_bytes, self.first_bytes = self._writer.lay_out_first()

    def write_first(self, data: Memory) -> None:
        self._writer.write_first(data, self._uuid)

    def write_rest(self, data: Memory) -> int:
        """Write the rest; return its end, after which memory is unchanged. Raises: IntegrityError without room."""
        return self._writer.write_rest(data, self._uuid)


class _Directory(NamedTuple):
    """The contents of a directory: its entries, then their names with "." and "..", sorted."""

    children: Sequence[int]  # entries; a range where adjacent
    names: list[bytes]
    one: int  # index of "."
    two: int  # index of ".."
    starts: list[int]  # indexes at which blocks begin
    last_bytes: int  # in the last block


class _Writer:
    """Lays out everything, then writes it. E entries.

    Nearly all entries are files in one piece. Their inodes are adjacent, each followed by its piece, at equal
    distances. So they are written column by column, many times faster than one by one.
    """

    def __init__(self, index: Index) -> None:
        self._index = index
        count = len(index)
        types = {mode: FILE_TYPES[stat.S_IFMT(mode)] for mode in set(index.modes)}
        self._types = bytearray(map(types.__getitem__, index.modes))  # E
        self._nlinks = [1] * count
        self._xattrs: dict[int, bytes] = {}  # following the inode
        self._directories: dict[int, _Directory] = {}
        self._sizes = list(index.sizes)
        self._addresses: list[int] = []  # E: of those in one piece; else HOLE
        self._nids = [0] * count  # E: of the inode, in NID_BYTES
        self._singles_at = 0  # where inodes of those in one piece begin, bytes
        self._blocks: dict[int, int] = {}  # entry -> its first block
        self._inline: dict[int, int] = {}  # entry -> bytes that follow its inode
        self._end_block = 0
        self._holes: list[int] = []  # entries without such an address, in order
        self._others: list[int] = []  # entries with inodes other than those of files in one piece, and not links
        self._first: list[int] = []  # of these the root, and the entries right behind it
        self._near: list[int] = []  # entries in directories of the first, which hold their numbers
        self._in_blocks: list[int] = []  # of the entries behind the first, those with blocks
        self._rest_at = 0  # where inodes of the rest begin, bytes
        self._last_at = 0  # where the last inode of the first ends

    @property
    def _is_crowded(self) -> bool:
        """Whether there are too many near entries to give each blocks; then all entries are processed first."""
        return len(self._near) > MAX_NEAR

    def lay_out_first(self) -> tuple[int, int]:
        """Return the maximum size of the image, and the size of its first part, in bytes."""
        self._classify()
        children = self._choose_first()
        in_blocks: list[int] = []
        at = ROOT_OFFSET
        for entry in self._first:
            if self._types[entry] == DIRECTORY:
                self._enter(entry, children.get(entry, range(0)))
            elif self._types[entry] == LINK:
                self._sizes[entry] = len(self._index.targets[entry])
            at = self._place_inode(entry, at, in_blocks)
        self._last_at = at
        first_bytes = self._place_blocks(in_blocks, -(-at // UNIT_BYTES)) * UNIT_BYTES
        self._singles_at = first_bytes
        singles = len(self._addresses) - self._addresses.count(HOLE)
        at = first_bytes + singles * _SINGLE_BYTES
        if self._is_crowded:
            self._enter_rest()
        for entry in self._near:
            if self._is_crowded:
                at = self._place_inode(entry, at, self._in_blocks)
            else:
                self._nids[entry] = at // NID_BYTES
                at = up(at + self._head_bytes(entry, at), NID_BYTES)
        self._number(child for entry in self._first for child in children.get(entry, ()))
        self._rest_at = at
        most = up(at + self._max_rest_bytes(), UNIT_BYTES)
        self._end_block = most // UNIT_BYTES
        return most, first_bytes

    def write_first(self, data: Memory, uuid: bytes) -> None:
        self._write_super(data, uuid)
        for entry in self._first:
            self._write_inode(data, entry)
            if entry in self._directories:
                self._write_directory(data, entry)

    def write_rest(self, data: Memory, uuid: bytes) -> int:
        self._lay_out_rest()
        if self._end_block * UNIT_BYTES > len(data):
            raise IntegrityError("this tree's metadata is larger than was foreseen")
        self._write_singles(data)
        first = set(self._first)
        for entry in self._others:
            if entry not in first:
                self._write_inode(data, entry)
        for entry in self._directories.keys() - first:
            self._write_directory(data, entry)
        self._write_super(data, uuid)
        return self._end_block * UNIT_BYTES

    # ---- classification ------------------------------------------------------------------------------------

    def _classify(self) -> None:
        index = self._index
        for entry, pairs in index.xattrs.items():
            self._xattrs[entry] = encode_xattrs(pairs)
        for entry in index.opaque:
            pairs = [pair for pair in index.xattrs.get(entry, []) if pair[0] != OPAQUE[0]]
            self._xattrs[entry] = encode_xattrs([*pairs, OPAQUE])
        self._addresses = [runs[0] if len(runs) == 2 and runs[1] == 1 else HOLE for runs in index.runs]
        for entry in self._xattrs:
            self._addresses[entry] = HOLE
        self._others = self._holes = [entry for entry, address in enumerate(self._addresses) if address == HOLE]
        links = index.links
        if links.count(-1) != len(links):
            for entry in self._others:
                if links[entry] != -1:
                    self._nlinks[links[entry]] += 1
            self._others = [entry for entry in self._others if links[entry] == -1]

    def _choose_first(self) -> dict[int, Sequence[int]]:
        """Choose the first and the near entries; return the children of the first ones."""
        links, others = self._index.links, set(self._others)
        inside = _group_some(self._index.parents, [0])
        first = [entry for entry in inside.get(0, ()) if entry in others]
        self._first = [0, *first] if len(first) <= MAX_FIRST else [0]
        children = inside | _group_some(self._index.parents, set(self._first[1:]))
        seen = set(self._first)
        for entry in self._first:
            for child in children.get(entry, ()):
                named = child if links[child] == -1 else links[child]
                if named in others and named not in seen:
                    seen.add(named)
                    self._near.append(named)
        return children

    def _number(self, entries: Iterable[int]) -> None:
        """Number the inodes of files in one piece, and other names, for entries whose numbers are needed now."""
        nids, links, addresses = self._nids, self._index.links, self._addresses
        first, step = self._singles_at // NID_BYTES, _SINGLE_BYTES // NID_BYTES
        for entry in entries:
            named = entry if links[entry] == -1 else links[entry]
            if addresses[named] != HOLE:
                nids[named] = first + (named - bisect_left(self._holes, named)) * step
            nids[entry] = nids[named]

    def _enter(self, entry: int, children: Sequence[int]) -> None:
        """Record a directory whose children are known."""
        directory = self._directories[entry] = self._directory(children)
        self._nlinks[entry] = 2 + bytes(_take(self._types, children)).count(DIRECTORY)
        self._sizes[entry] = (len(directory.starts) - 1) * UNIT_BYTES + directory.last_bytes

    def _max_rest_bytes(self) -> int:
        """Return an upper limit for the rest and all blocks; excess only costs address space."""
        index = self._index
        count = len(self._others)
        pieces = sum(sum(index.runs[entry][1::2]) for entry in self._others if index.runs[entry])
        heads = count * (INODE_BYTES + NID_BYTES) + sum(map(len, self._xattrs.values())) + pieces * CHUNK.size
        names = len(b"".join(index.names)) + len(index) * DIRENT.size + count * (2 * DIRENT.size + 3)
        once = heads + names + sum(len(index.targets[entry]) for entry in self._others)
        # An item that does not fit into a block begins another one, and wastes less than its own length.
        return 2 * once + (len(self._near) + once // (UNIT_BYTES - 300) + once // MAX_INLINE + 4) * UNIT_BYTES

    def _lay_out_rest(self) -> None:
        """Place all entries without a place."""
        nids, links = self._nids, self._index.links
        if not self._is_crowded:
            self._enter_rest()
            has_data = (DIRECTORY, LINK)
            self._in_blocks = [entry for entry in self._near if self._types[entry] in has_data]
        nid = self._singles_at // NID_BYTES
        for entry, address in enumerate(self._addresses):
            if address != HOLE:
                nids[entry] = nid
                nid += _SINGLE_BYTES // NID_BYTES
        at = self._rest_at
        placed = {*self._first, *self._near}
        for entry in self._others:
            if entry not in placed:
                at = self._place_inode(entry, at, self._in_blocks)
        if links.count(-1) != len(links):
            for entry, link in enumerate(links):
                if link != -1:
                    nids[entry] = nids[link]
        # fsck.erofs reads where attributes would begin, even after a last inode without any.
        last_at = at if at > self._singles_at else self._last_at
        block = max(self._singles_at // UNIT_BYTES, -(-(last_at + XATTR_HEADER_BYTES) // UNIT_BYTES))
        self._end_block = self._place_blocks(self._in_blocks, block)

    def _enter_rest(self) -> None:
        """Record all other directories and links, from all entries."""
        grouped = _group(self._index.parents)
        for entry in self._others:
            kind = self._types[entry]
            if kind == DIRECTORY and entry not in self._directories:
                self._enter(entry, grouped.get(entry, range(0)))
            elif kind == LINK:
                self._sizes[entry] = len(self._index.targets[entry])

    def _directory(self, children: Sequence[int]) -> _Directory:
        """Cut the sorted names of a directory into blocks."""
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
        return _Directory(children, names, one, two, starts, used)

    # ---- layout --------------------------------------------------------------------------------------------
    #
    # Order: the root, as its number has 16 bits, with its directories and the like; files in one piece; near
    # entries (if they are few, without data behind their inodes, as it is not known yet); all other inodes; then
    # whole blocks.

    def _place_inode(self, entry: int, at: int, in_blocks: list[int]) -> int:
        """Place an inode at `at` or soon after; return the next free place. Adds to `in_blocks` if needed."""
        head = self._head_bytes(entry, at)
        size = self._sizes[entry]
        if self._types[entry] in (DIRECTORY, LINK):
            tail = size % UNIT_BYTES
            if 0 < tail <= MAX_INLINE:
                self._inline[entry] = tail
                if (at + head) % UNIT_BYTES + tail > UNIT_BYTES:  # it must not cross a block boundary
                    at = up(up(at + head, UNIT_BYTES) - head, NID_BYTES)
                head += tail
            if size > self._inline.get(entry, 0):
                in_blocks.append(entry)
        self._nids[entry] = at // NID_BYTES
        return up(at + head, NID_BYTES)

    def _head_bytes(self, entry: int, at: int) -> int:
        """Return the bytes of an inode at `at` with its fixed parts."""
        head = INODE_BYTES + len(self._xattrs.get(entry, b""))
        if self._types[entry] == FILE and self._sizes[entry]:
            pieces = sum(self._index.runs[entry][1::2])
            head = up(at + head, CHUNK.size) - at + pieces * CHUNK.size
        return head

    def _place_blocks(self, entries: Sequence[int], block: int) -> int:
        """Place the blocks of entries from `block` on; return the next free one."""
        for entry in entries:
            self._blocks[entry] = block
            block += -(-(self._sizes[entry] - self._inline.get(entry, 0)) // UNIT_BYTES)
        return block

    # ---- bytes ---------------------------------------------------------------------------------------------

    def _write_super(self, data: Memory, uuid: bytes) -> None:
        index = self._index
        inodes = index.links.count(-1)
        SUPER.pack_into(
            data, SUPER_OFFSET, MAGIC, 0, MTIME, UNIT_BYTES.bit_length() - 1, 0, ROOT_OFFSET // NID_BYTES, inodes,
            0, 0, self._end_block, 0, 0, uuid, b"bootseer", CHUNKED | DEVICES, 0, 1, DEVICE_SLOT, 0, 0, 0, 0, 0,
        )  # fmt: skip
        SLOT.pack_into(data, DEVICE_SLOT * SLOT_BYTES, b"", index.block_count * BLOCK_UNITS, 0)

    def _write_singles(self, data: Memory) -> None:
        """Write inodes of files in one piece: the common fields, then column by column."""
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
            put(8, index.sizes)  # of 8 bytes; these files have at most one block
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

    def _write_directory(self, data: Memory, entry: int) -> None:
        nids, pack = self._nids, DIRENT.pack
        children, names, one, two, starts, _ = self._directories[entry]
        numbers, kinds = list(_take(nids, children)), bytearray(_take(self._types, children))
        numbers.insert(one, nids[entry])
        numbers.insert(two, nids[self._index.parents[entry]])
        kinds.insert(one, DIRECTORY)
        kinds.insert(two, DIRECTORY)
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
    """Return the entries of each non-empty directory, in order; those of one directory are mostly adjacent."""
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


def _group_some(parents: list[int], directories: Collection[int]) -> dict[int, Sequence[int]]:
    found: dict[int, list[int]] = {}
    if len(directories) > _FEW:
        for entry in [entry for entry, parent in enumerate(parents) if parent in directories]:
            found.setdefault(parents[entry], []).append(entry)
        return dict(found)
    for directory in directories:  # no work for each entry
        entry = 0  # the root is in no directory
        for _ in range(parents.count(directory) - (parents[0] == directory)):
            entry = parents.index(directory, entry + 1)
            found.setdefault(directory, []).append(entry)
    return dict(found)


def _take(column: Sequence[T], entries: Sequence[int]) -> Iterable[T]:
    if isinstance(entries, range):
        return column[entries.start : entries.stop]
    return map(column.__getitem__, entries)


def _words(kind: Literal["I", "q"], numbers: Iterable[int]) -> memoryview:
    """Convert numbers ("I", "q") to 32-bit words, the lower one first."""
    found = array(kind, list(numbers))
    if sys.byteorder == "big":
        found.byteswap()
    return memoryview(found).cast("B").cast("I")
