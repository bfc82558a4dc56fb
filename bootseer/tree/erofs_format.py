"""The on-disk format of EROFS, as far as erofs.py writes it: numbers, structures, small encodings. Pure.

Source: fs/erofs/erofs_fs.h of Linux.
"""

from __future__ import annotations

import stat
import struct
from itertools import chain, repeat

from bootseer.tree.index import BLOCK_UNITS, HOLE

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
MAX_INLINE = 2048  # longer tails get a block of their own

SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
SLOT = struct.Struct("<64sII56x")
INODE = struct.Struct("<HHHHQIIIIqII16x")
CHUNK = struct.Struct("<HHI")
DIRENT = struct.Struct("<QHBB")
XATTR = struct.Struct("<BBH")
XATTR_HEADER_BYTES = 12
FILE_TYPES = {
    stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4, stat.S_IFIFO: 5, stat.S_IFSOCK: 6,
    stat.S_IFLNK: 7,
}  # fmt: skip
PREFIXES = ((b"user.", 1), (b"system.posix_acl_access", 2), (b"system.posix_acl_default", 3), (b"trusted.", 4),
             (b"security.", 6))  # fmt: skip
FILE, DIRECTORY, LINK = (FILE_TYPES[each] for each in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK))
OPAQUE = (b"trusted.overlay.opaque", b"y")
NS = 1_000_000_000


def addresses_of(runs: list[int]) -> chain[int]:
    """Return the address of each piece, or HOLE."""
    return chain.from_iterable(
        repeat(HOLE, runs[place + 1])
        if runs[place] == HOLE
        else range(runs[place], runs[place] + runs[place + 1] * BLOCK_UNITS, BLOCK_UNITS)
        for place in range(0, len(runs), 2)
    )


def encode_xattrs(pairs: list[tuple[bytes, bytes]]) -> bytes:
    """Encode the header and all attributes, as they follow an inode."""
    data = bytearray(XATTR_HEADER_BYTES)
    for name, value in pairs:
        prefix, number = next(pair for pair in PREFIXES if name.startswith(pair[0]))
        rest = name[len(prefix) :]
        data += XATTR.pack(len(rest), number, len(value)) + rest + value
        data += bytes(-len(data) % 4)
    return bytes(data)


def device_number(major: int, minor: int) -> int:
    """Encode a device number in 32 bits, as the kernel does."""
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def up(number: int, step: int) -> int:
    return -(-number // step) * step
