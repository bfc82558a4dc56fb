"""zstd, for indexes and blocks: the only door to the library. Compressors are kept a thread: making one costs."""

from __future__ import annotations

import threading
from typing import Any

from bootseer.errors import ConfigError, IntegrityError

LEVEL = 3

_own = threading.local()


def compress(data: bytes | memoryview) -> bytes:
    """One frame, with the size in it and no checksum: the digest of the frame is checked."""
    compressor = getattr(_own, "compressor", None)
    if compressor is None:
        compressor = _own.compressor = library().ZstdCompressor(level=LEVEL, write_content_size=True)
    frame: bytes = compressor.compress(data)
    return frame


def decompress(frame: bytes | memoryview, most_bytes: int, where: str) -> bytes:
    """What is in one frame; nothing is never stored as one.

    Raises: IntegrityError when it says that it holds more than `most_bytes`, or is none; no more is made.
    """
    zstandard = library()
    decompressor = getattr(_own, "decompressor", None)
    if decompressor is None:
        decompressor = _own.decompressor = zstandard.ZstdDecompressor()
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 < size <= most_bytes:  # of those that say 0 the library does not look at the rest
            raise IntegrityError(f"{where}: says that it holds {size} bytes; 1 to {most_bytes}")
        data: bytes = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{where}: cannot be decompressed: {error}") from error
    if len(data) != size:
        raise IntegrityError(f"{where}: gave {len(data)} bytes instead of {size}")
    return data


def version() -> str:
    """What decides the bytes: library and level."""
    zstandard = library()
    return f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))} level {LEVEL}"


def library() -> Any:
    """The zstandard module. Raises: ConfigError when it is not installed."""
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ConfigError("trees need zstandard: pip install 'bootseer[image]'") from error
    return zstandard
