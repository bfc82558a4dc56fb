"""zstd for indexes and blocks: the only user of the library. Each thread keeps its (costly) compressors."""

from __future__ import annotations

import threading
from typing import Any

from bootseer.errors import ConfigError, IntegrityError

LEVEL = 3

_own = threading.local()


def compress(data: bytes | memoryview) -> bytes:
    """Compress to one frame, with the size in it and no checksum: readers verify the digest of the frame."""
    compressor = getattr(_own, "compressor", None)
    if compressor is None:
        compressor = _own.compressor = library().ZstdCompressor(level=LEVEL, write_content_size=True)
    frame: bytes = compressor.compress(data)
    return frame


def decompress(frame: bytes | memoryview, max_bytes: int, where: str) -> bytes:
    """Decompress one frame, which is never empty.

    Raises: IntegrityError when its size exceeds `max_bytes`, or it is not a frame; the output is bounded.
    """
    zstandard = library()
    decompressor = getattr(_own, "decompressor", None)
    if decompressor is None:
        decompressor = _own.decompressor = zstandard.ZstdDecompressor()
    try:
        size = zstandard.frame_content_size(frame)
        if not 0 < size <= max_bytes:  # for a size of 0 the library ignores the rest
            raise IntegrityError(f"{where}: claims to hold {size} bytes; 1 to {max_bytes}")
        data: bytes = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{where}: cannot be decompressed: {error}") from error
    if len(data) != size:
        raise IntegrityError(f"{where}: gave {len(data)} bytes instead of {size}")
    return data


def version() -> str:
    """Return the library and level, which determine the bytes."""
    zstandard = library()
    return f"zstd {'.'.join(map(str, zstandard.ZSTD_VERSION))} level {LEVEL}"


def library() -> Any:
    """Return the zstandard module. Raises: ConfigError when it is not installed."""
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise ConfigError("trees need zstandard: pip install 'bootseer[image]'") from error
    return zstandard
