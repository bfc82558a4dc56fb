"""Checksums (CRC32C) of cached data, by the `crc32c` library: every read verifies the granules that it covers.

The checksums find damage by a disk, a crash or a full file system. The SHA-256 of the data was verified when it
was fetched.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from bootseer.tree.index import BLOCK_BYTES

GRANULE_SHIFT = 14
GRANULE_BYTES = 1 << GRANULE_SHIFT  # a read verifies at least so much; most reads of a start are 4 to 64 KiB
BLOCK_GRANULES = BLOCK_BYTES // GRANULE_BYTES
BLOCK_CHECKSUMS = struct.Struct(f"<{BLOCK_GRANULES}I")  # as they are stored

Buffer = memoryview | bytes | bytearray
UNKNOWN = 0  # no granule has this checksum


def as_checksum(found: int) -> int:
    """Return the checksum of a granule with this CRC32C: none is UNKNOWN."""
    return found or 1


def checksum_block(crc32c: Callable[[Buffer], int], data: Buffer) -> tuple[int, ...]:
    """Return the checksums of a whole block of BLOCK_BYTES."""
    view = memoryview(data)
    return tuple(crc32c(view[at : at + GRANULE_BYTES]) or 1 for at in range(0, BLOCK_BYTES, GRANULE_BYTES))
