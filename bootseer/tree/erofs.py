"""EROFS metadata for a tree, so that the kernel shows it: inodes, folders and where data lies on the device.

In: a checked Index. Out: the bytes of an image without data, to be mounted with `device=` naming the device that
all blocks form. Uncompressed and chunk-indexed, one external device, nothing else. It is made on the node that
mounts it, from the verified index, so the kernel parses nothing foreign. The same index gives the same bytes.

Source: fs/erofs/erofs_fs.h of Linux; mkfs.erofs and fsck.erofs are the oracles of its tests.
"""

from __future__ import annotations

import stat
import struct
from itertools import chain, repeat

from bootseer.tree.index import BLOCK_UNITS, HOLE, UNIT_BYTES, Index

VERSION = 1  # of what is made from an index; another one is another file in the cache
MAGIC = 0xE0F5E1E2
SUPER_OFFSET = 1024
SLOT_BYTES = 128  # of the device table, and of the superblock
DEVICE_SLOT = (SUPER_OFFSET + 128) // SLOT_BYTES
ROOT_OFFSET = SUPER_OFFSET + 128 + SLOT_BYTES
NID_BYTES = 32
INODE_BYTES = 64
MTIME = 0x2  # compatible feature: times of inodes are those of modification
CHUNKED, DEVICES = 0x4, 0x8  # incompatible features
PLAIN, INLINE, CHUNKS = 0, 2, 4  # data layouts
CHUNK_INDEXES = 0x20
CHUNK_FORMAT = CHUNK_INDEXES | (BLOCK_UNITS.bit_length() - 1)
NO_ADDRESS = 0xFFFFFFFF
MOST_INLINE = 2048  # longer ends get a block of their own

_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
_SLOT = struct.Struct("<64sII56x")
_INODE = struct.Struct("<HHHHQIIIIqII16x")
_CHUNK = struct.Struct("<HHI")
_DIRENT = struct.Struct("<QHBB")
_XATTR = struct.Struct("<BBH")
_XATTR_HEADER_BYTES = 12
_FILE_TYPES = {
    stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4, stat.S_IFIFO: 5, stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}  # fmt: skip
_PREFIXES = ((b"user.", 1), (b"system.posix_acl_access", 2), (b"system.posix_acl_default", 3), (b"trusted.", 4),
             (b"security.", 6))  # fmt: skip
_OPAQUE = (b"trusted.overlay.opaque", b"y")
NS = 1_000_000_000


def metadata(index: Index, digest: str) -> bytearray:
    """The image of a tree with this digest; a multiple of 4096 bytes."""
    return _Writer(index).write(bytes.fromhex(digest)[:16])


class _Writer:
    """Where everything lies, then its bytes. E entries."""

    def __init__(self, index: Index) -> None:
        self._index = index
        count = len(index)
        self._children: list[list[int]] = [[] for _ in range(count)]  # E: entries in a folder, sorted by name
        self._nlinks = [1] * count
        self._xattrs: dict[int, bytes] = {}  # as they follow the inode
        self._folders: dict[int, list[list[tuple[bytes, int]]]] = {}  # (name, entry) by block
        self._sizes = list(index.sizes)
        self._positions = [0] * count  # E: of the inode, bytes
        self._blocks: dict[int, int] = {}  # entry -> first block of its own
        self._inline: dict[int, int] = {}  # entry -> bytes that follow its inode
        self._end_block = 0

    def write(self, uuid: bytes) -> bytearray:
        self._gather()
        self._place()
        data = bytearray(self._end_block * UNIT_BYTES)
        self._write_super(data, uuid)
        self._write_inodes(data)
        self._write_folders(data)
        return data

    # ---- what there is -------------------------------------------------------------------------------------

    def _gather(self) -> None:
        index = self._index
        modes, links = index.modes, index.links
        for entry, parent in enumerate(index.parents):
            if entry:
                self._children[parent].append(entry)
        for entry, mode in enumerate(modes):
            if links[entry] != -1:
                self._nlinks[links[entry]] += 1
            elif stat.S_ISDIR(mode):
                folder = self._folder(entry)
                self._folders[entry] = folder
                self._nlinks[entry] = 2 + sum(stat.S_ISDIR(modes[child]) for child in self._children[entry])
                self._sizes[entry] = (len(folder) - 1) * UNIT_BYTES + _block_bytes(folder[-1])
            elif stat.S_ISLNK(mode):
                self._sizes[entry] = len(index.targets[entry])
        for entry, pairs in index.xattrs.items():
            self._xattrs[entry] = _xattrs(pairs)
        for entry in index.opaque:
            pairs = [pair for pair in index.xattrs.get(entry, []) if pair[0] != _OPAQUE[0]]
            self._xattrs[entry] = _xattrs([*pairs, _OPAQUE])

    def _folder(self, entry: int) -> list[list[tuple[bytes, int]]]:
        """Names of a folder and what they mean, cut into blocks."""
        names, links = self._index.names, self._index.links
        found = [(names[child], child if links[child] == -1 else links[child]) for child in self._children[entry]]
        found += [(b".", entry), (b"..", self._index.parents[entry])]
        found.sort()
        blocks: list[list[tuple[bytes, int]]] = [[]]
        used = 0
        for pair in found:
            needed = _DIRENT.size + len(pair[0])
            if used + needed > UNIT_BYTES:
                blocks.append([])
                used = 0
            blocks[-1].append(pair)
            used += needed
        return blocks

    # ---- where it lies -------------------------------------------------------------------------------------

    def _place(self) -> None:
        """Inodes one after the other, the root first as its number has 16 bits; then whole blocks of folders."""
        index, xattrs, sizes = self._index, self._xattrs, self._sizes
        at = ROOT_OFFSET
        in_blocks = []
        for entry, (mode, link) in enumerate(zip(index.modes, index.links, strict=True)):
            if link != -1:
                continue
            head = INODE_BYTES + len(xattrs.get(entry, b""))
            size = sizes[entry]
            if stat.S_ISREG(mode):
                if size:
                    self._positions[entry] = at
                    pieces = sum(index.runs[entry][1::2])
                    at = _up(_up(at + head, _CHUNK.size) + pieces * _CHUNK.size, NID_BYTES)
                    continue
            elif stat.S_ISDIR(mode) or stat.S_ISLNK(mode):
                tail = size % UNIT_BYTES
                if 0 < tail <= MOST_INLINE:
                    self._inline[entry] = tail
                    if (at + head) % UNIT_BYTES + tail > UNIT_BYTES:  # it may not lie in two blocks
                        at = _up(_up(at + head, UNIT_BYTES) - head, NID_BYTES)
                    head += tail
                if size > self._inline.get(entry, 0):
                    in_blocks.append(entry)
            self._positions[entry] = at
            at = _up(at + head, NID_BYTES)
        block = -(-at // UNIT_BYTES)
        for entry in in_blocks:
            self._blocks[entry] = block
            block += -(-(sizes[entry] - self._inline.get(entry, 0)) // UNIT_BYTES)
        self._end_block = block

    # ---- its bytes -----------------------------------------------------------------------------------------

    def _write_super(self, data: bytearray, uuid: bytes) -> None:
        index = self._index
        inodes = len(index) - sum(link != -1 for link in index.links)
        _SUPER.pack_into(
            data, SUPER_OFFSET, MAGIC, 0, MTIME, UNIT_BYTES.bit_length() - 1, 0, ROOT_OFFSET // NID_BYTES, inodes,
            0, 0, self._end_block, 0, 0, uuid, b"bootseer", CHUNKED | DEVICES, 0, 1, DEVICE_SLOT, 0, 0, 0, 0, 0,
        )  # fmt: skip
        _SLOT.pack_into(data, DEVICE_SLOT * SLOT_BYTES, b"", index.block_count * BLOCK_UNITS, 0)

    def _write_inodes(self, data: bytearray) -> None:
        index, positions, sizes, nlinks = self._index, self._positions, self._sizes, self._nlinks
        pack, chunk_pack = _INODE.pack_into, _CHUNK.pack_into
        rows = zip(
            index.links,
            index.modes,
            index.uids,
            index.gids,
            index.mtimes_ns,
            index.runs,
            index.targets,
            strict=True,
        )
        for entry, (link, mode, uid, gid, mtime_ns, runs, target) in enumerate(rows):
            if link != -1:
                continue
            at = positions[entry]
            size = sizes[entry]
            attributes = self._xattrs.get(entry, b"")
            layout, where = PLAIN, 0
            end = at + INODE_BYTES + len(attributes)
            if runs:
                layout, where = CHUNKS, CHUNK_FORMAT
                end = _up(end, _CHUNK.size)
                for address in _addresses(runs):
                    if address == HOLE:
                        chunk_pack(data, end, 0xFFFF, 0, NO_ADDRESS)
                    else:
                        chunk_pack(data, end, 0, 1, address)
                    end += _CHUNK.size
            elif entry in index.rdevs:
                where = _device_number(*index.rdevs[entry])
            else:
                inline = self._inline.get(entry, 0)
                layout = INLINE if inline else PLAIN
                where = self._blocks.get(entry, 0)
                if target:
                    start = end if inline else where * UNIT_BYTES
                    data[start : start + len(target)] = target
            count = (len(attributes) - _XATTR_HEADER_BYTES) // 4 + 1 if attributes else 0
            seconds, ns = divmod(mtime_ns, NS)
            number = (entry + 1) & 0xFFFFFFFF
            pack(
                data,
                at,
                1 | layout << 1,
                count,
                mode,
                0,
                size,
                where,
                number,
                uid,
                gid,
                seconds,
                ns,
                nlinks[entry],
            )
            if attributes:
                data[at + INODE_BYTES : at + INODE_BYTES + len(attributes)] = attributes

    def _write_folders(self, data: bytearray) -> None:
        positions, modes = self._positions, self._index.modes
        for entry, blocks in self._folders.items():
            inline = self._inline.get(entry, 0)
            start = self._blocks.get(entry, 0) * UNIT_BYTES
            for number, block in enumerate(blocks):
                if inline and number == len(blocks) - 1:
                    at = positions[entry] + INODE_BYTES + len(self._xattrs.get(entry, b""))
                else:
                    at = start + number * UNIT_BYTES
                name_offset = len(block) * _DIRENT.size
                for place, (name, child) in enumerate(block):
                    kind = _FILE_TYPES[stat.S_IFMT(modes[child])]
                    _DIRENT.pack_into(
                        data, at + place * _DIRENT.size, positions[child] // NID_BYTES, name_offset, kind, 0
                    )
                    data[at + name_offset : at + name_offset + len(name)] = name
                    name_offset += len(name)


def _addresses(runs: list[int]) -> chain[int]:
    """Of each piece, HOLE where there is nothing."""
    return chain.from_iterable(
        repeat(HOLE, runs[place + 1])
        if runs[place] == HOLE
        else range(runs[place], runs[place] + runs[place + 1] * BLOCK_UNITS, BLOCK_UNITS)
        for place in range(0, len(runs), 2)
    )


def _block_bytes(block: list[tuple[bytes, int]]) -> int:
    return sum(_DIRENT.size + len(name) for name, _ in block)


def _xattrs(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """The header and all of them, as they follow an inode."""
    data = bytearray(_XATTR_HEADER_BYTES)
    for name, value in pairs:
        prefix, number = next(pair for pair in _PREFIXES if name.startswith(pair[0]))
        rest = name[len(prefix) :]
        data += _XATTR.pack(len(rest), number, len(value)) + rest + value
        data += bytes(-len(data) % 4)
    return bytes(data)


def _device_number(major: int, minor: int) -> int:
    """As the kernel stores it in 32 bits."""
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
