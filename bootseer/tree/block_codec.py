"""Storage of blocks: as a zstd frame, as an LZ4 frame, or uncompressed. A frame identifies its own kind.

zstd makes smaller blocks, for slow links. LZ4 decompresses with the least work, for stores as fast as a core. A
Python environment on one core becomes 3.3 and 2.9 times smaller, decompressed at 1.4 and 3.5 GB/s. SHA-256 (1.3
GB/s) would take as long as the rest, so LZ4 frames have BLAKE3 digests (3.5 GB/s). Only this module uses the
libraries lz4 and blake3.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from bootseer.errors import ConfigError, IntegrityError
from bootseer.tree import compression

Codec = Literal["zstd", "lz4"]

MIN_SAVING = 16  # a block that saves less than one part in so many is stored uncompressed
LZ4_LEVEL = 4  # of its slow compressor: a third slower than zstd's 3; 9 takes twice as long and saves one percent
_LZ4_MAGIC = b"\x04\x22\x4d\x18"

_own = threading.local()


def pack_block(data: bytes | memoryview, codec: Codec) -> bytes:
    """Return the stored form of a block; equal length means uncompressed."""
    frame = compression.compress(data) if codec == "zstd" else _compress_lz4(data)
    return frame if len(frame) <= len(data) - len(data) // MIN_SAVING else bytes(data)


def block_digest(stored: bytes | memoryview) -> bytes:
    """Return the digest of a stored block for the index: 32 bytes."""
    if stored[:4] != _LZ4_MAGIC:
        return hashlib.sha256(stored).digest()
    digest: bytes = _blake3()(stored).digest()
    return digest


def unpack_block(stored: bytes | memoryview, raw_bytes: int, where: str) -> bytes | memoryview:
    """Return the bytes of a block: `stored` itself if uncompressed. Raises: IntegrityError; output is bounded."""
    if len(stored) == raw_bytes:
        return stored
    if stored[:4] == _LZ4_MAGIC:
        raw = _decompress_lz4(stored, raw_bytes, where)
    else:
        raw = compression.decompress(stored, raw_bytes, where)
    if len(raw) != raw_bytes:
        raise IntegrityError(f"{where}: holds {len(raw)} bytes, and {raw_bytes} in the index")
    return raw


def version(codec: Codec) -> str:
    """Return the library and level, which determine the bytes of blocks."""
    if codec == "zstd":
        return compression.version()
    from lz4 import library_version_string

    return f"lz4 {library_version_string()} level {LZ4_LEVEL}"


def _compress_lz4(data: bytes | memoryview) -> bytes:
    lz4_frame = _lz4_frame()
    frame: bytes = lz4_frame.compress(
        data,
        compression_level=LZ4_LEVEL,
        block_size=lz4_frame.BLOCKSIZE_MAX64KB,
        block_linked=True,
        store_size=True,
    )
    return frame


def _decompress_lz4(stored: bytes | memoryview, raw_bytes: int, where: str) -> bytes:
    lz4_frame = _lz4_frame()
    context = getattr(_own, "context", None)
    try:
        if context is None:
            context = _own.context = lz4_frame.create_decompression_context()
        else:
            lz4_frame.reset_decompression_context(context)
        raw: bytes
        raw, used, is_end = lz4_frame.decompress_chunk(context, stored, max_length=raw_bytes)
    except RuntimeError as error:
        raise IntegrityError(f"{where}: cannot be decompressed: {error}") from error
    if not is_end or used != len(stored):
        raise IntegrityError(f"{where}: is not one LZ4 frame of {raw_bytes} bytes")
    return raw


@functools.cache
def _lz4_frame() -> Any:
    with _naming("lz4"):
        # Not `lz4.frame` after `import lz4.frame`: another thread's import may not have set the attribute yet.
        from lz4 import frame
    return frame


@functools.cache
def _blake3() -> Any:
    with _naming("blake3"):
        from blake3 import blake3
    return blake3


@contextmanager
def _naming(library: str) -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"trees need {library}: pip install 'bootseer[image]'") from error
