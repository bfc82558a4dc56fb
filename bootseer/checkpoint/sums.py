"""CRC32C of stripe units, by the `crc32c` library: any buffer, at memory speed, without the interpreter's lock."""

from __future__ import annotations

from bootseer import crc
from bootseer.errors import ConfigError


def crc32c(data: memoryview | bytes | bytearray, start: int = 0) -> int:
    """The sum of `data`, going on from the sum `start` of what comes before it."""
    try:
        sum_of = crc.load()
    except ImportError as error:
        raise ConfigError(
            "sums of checkpoints need the library crc32c: pip install 'bootseer[checkpoint]'"
        ) from error
    return sum_of(data, start)
