"""CRC32C of cached data, by the `crc32c` library: every read of the cache checks the granules that it covers.

The sums find what a disk, a crash or a full file system did to a cache; who made the data was settled by its
SHA-256 when it came.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from bootseer import crc
from bootseer.errors import ConfigError
from bootseer.tree.index import BLOCK_BYTES

GRANULE_SHIFT = 14
GRANULE_BYTES = 1 << GRANULE_SHIFT  # a read checks at least so much; most reads of a start are 4 to 64 KiB
BLOCK_GRANULES = BLOCK_BYTES // GRANULE_BYTES
BLOCK_SUMS = struct.Struct(f"<{BLOCK_GRANULES}I")  # as they are stored

Buffer = memoryview | bytes | bytearray
UNKNOWN = 0  # no granule has this sum


def load_crc32c() -> Callable[[Buffer], int]:
    """The library's function. Raises: ConfigError when it is not installed."""
    try:
        return crc.load()
    except ImportError as error:
        raise ConfigError("the block cache needs crc32c: pip install 'bootseer[image]'") from error


def as_sum(found: int) -> int:
    """The sum of a granule with this CRC32C: none is UNKNOWN."""
    return found or 1


def sum_block(crc32c: Callable[[Buffer], int], data: Buffer) -> tuple[int, ...]:
    """The sums of a whole block of BLOCK_BYTES."""
    view = memoryview(data)
    return tuple(crc32c(view[at : at + GRANULE_BYTES]) or 1 for at in range(0, BLOCK_BYTES, GRANULE_BYTES))
