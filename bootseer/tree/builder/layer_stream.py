"""A layer of an image as chunks of its tar archive: decompressed in bounded memory, with verified checksums.

In: a byte stream, its descriptor, and the diff ID. Out: chunks of at most CHUNK_BYTES. Do not trust any chunk
before the last one: only then are the checksums complete.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from typing import Protocol

from bootseer.errors import DigestMismatch, IntegrityError, Truncated
from bootseer.storage.oci.manifest import Descriptor
from bootseer.tree import compression

CHUNK_BYTES = 1 << 20
MAX_LAYER_BYTES = 1 << 40  # decompressed
MAX_WINDOW_BYTES = 128 << 20  # of zstd: the default limit of its command-line tool
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte 0x50 to 0x5f


class ByteStream(Protocol):
    """The source of a layer. It enforces its own deadlines."""

    def read(self, size: int, /) -> bytes:
        """Return at most `size` bytes, and none only at the end."""


def read_layer(
    stream: ByteStream, layer: Descriptor, diff_id: str, where: str, *, max_bytes: int = MAX_LAYER_BYTES
) -> Iterator[bytes]:
    """Decompress the archive, whose digest is `diff_id`, from the configuration.

    Raises: Truncated, DigestMismatch or IntegrityError with the last chunk or earlier, when it differs from the
    manifest; IntegrityError for more than `max_bytes` of output.
    """
    verified = _Verified(stream, layer, where)
    algorithm, _, expected = diff_id.partition(":")
    digest = hashlib.new(algorithm)
    total = 0
    for chunk in _decompress(verified, where):
        total += len(chunk)
        if total > max_bytes:
            raise IntegrityError(f"{where}: has more than {max_bytes} bytes when decompressed: rejected")
        digest.update(chunk)
        yield chunk
    verified.finish()
    if digest.hexdigest() != expected:
        raise DigestMismatch(f"{where}: its content differs from the digest in the image's configuration")


class _Verified:
    """A stream that is verified by its descriptor."""

    def __init__(self, stream: ByteStream, layer: Descriptor, where: str) -> None:
        self._stream = stream
        self._where = where
        self._size = self._left = layer.size
        algorithm, _, self._expected = layer.digest.partition(":")
        self._digest = hashlib.new(algorithm)
        self._held = b""  # read, and to be returned again

    def peek(self, size: int) -> bytes:
        """Return the first bytes; `read` returns them again."""
        while len(self._held) < size:
            more = self._take(size - len(self._held))
            if not more:
                break
            self._held += more
        return self._held

    def read(self, size: int = -1) -> bytes:
        if self._held:
            held, self._held = self._held, b""
            return held  # at most a chunk: it was read as one
        return self._take(CHUNK_BYTES if size < 0 else size)

    def give_back(self, data: bytes) -> None:
        """Return data that was read too early."""
        self._held = data

    def finish(self) -> None:
        """Read the rest, which decompressors leave, and verify the digest."""
        while self.read(CHUNK_BYTES):
            pass
        if self._digest.hexdigest() != self._expected:
            raise DigestMismatch(f"{self._where}: is damaged: its digest is not the one in the manifest")

    def _take(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left + 1))
        self._left -= len(data)
        if self._left < 0:
            raise IntegrityError(f"{self._where}: is longer than the {self._size} bytes of the manifest")
        if not data and self._left:
            raise Truncated(f"{self._where}: ends after {self._size - self._left} of {self._size} bytes")
        self._digest.update(data)
        return data


def _decompress(source: _Verified, where: str) -> Iterator[bytes]:
    """Decompress by the first bytes, as other tools do: media types are wrong at times."""
    begin = source.peek(4)
    if begin.startswith(_GZIP):
        return _gunzip(source, where)
    if begin == _ZSTD or (begin[1:] == _ZSTD_SKIPPABLE and begin[0] & 0xF0 == 0x50):
        return _unzstd(source, where)
    return iter(lambda: source.read(CHUNK_BYTES), b"")


def _gunzip(source: _Verified, where: str) -> Iterator[bytes]:
    """Decompress one gzip member after another; zeros may follow."""
    try:
        while True:
            decompressor = zlib.decompressobj(zlib.MAX_WBITS | 16)
            data = source.read(CHUNK_BYTES)
            while data and not data.strip(b"\0"):
                data = source.read(CHUNK_BYTES)
            if not data:
                return
            while not decompressor.eof:
                out = decompressor.decompress(data, CHUNK_BYTES)
                if out:
                    yield out
                data = decompressor.unconsumed_tail
                if not data and not out and not decompressor.eof:
                    data = source.read(CHUNK_BYTES)
                    if not data:
                        raise Truncated(f"{where}: the compressed data ends too early")
            source.give_back(decompressor.unused_data.lstrip(b"\0"))
    except zlib.error as error:
        raise IntegrityError(f"{where}: cannot be decompressed: {error}") from error


def _unzstd(source: _Verified, where: str) -> Iterator[bytes]:
    """Decompress one frame after another. The digest of the contents shows a truncated last frame."""
    zstandard = compression.library()
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(
            source, read_size=CHUNK_BYTES, read_across_frames=True, closefd=False
        ) as reader:
            while chunk := reader.read(CHUNK_BYTES):
                yield chunk
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{where}: cannot be decompressed: {error}") from error
