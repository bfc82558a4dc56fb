"""A layer of an image as chunks of its tar archive: decompressed with bounded memory, all its sums checked.

In: a byte stream and what the manifest and the configuration say of it. Out: chunks of at most CHUNK_BYTES;
nothing of them may be believed before the last one has come, as only then the sums are known.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from typing import Protocol

from bootseer.errors import DigestMismatch, IntegrityError, Truncated
from bootseer.storage.oci_manifest import Descriptor
from bootseer.tree import compression

CHUNK_BYTES = 1 << 20
MOST_LAYER_BYTES = 1 << 40  # decompressed
MOST_WINDOW_BYTES = 128 << 20  # of zstd: what its own tool takes without being told
_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZSTD_SKIPPABLE = b"\x2a\x4d\x18"  # after a byte 0x50 to 0x5f


class ByteStream(Protocol):
    """What a layer is read from. Deadlines are its business."""

    def read(self, size: int, /) -> bytes:
        """At most `size` bytes, none only at the end."""


def read_layer(
    stream: ByteStream, layer: Descriptor, diff_id: str, where: str, *, most_bytes: int = MOST_LAYER_BYTES
) -> Iterator[bytes]:
    """The archive. `diff_id` is its digest, from the configuration.

    Raises: Truncated, DigestMismatch or IntegrityError when it is not what the manifest says, with the last chunk
    or before; IntegrityError when more than `most_bytes` come out.
    """
    verified = _Verified(stream, layer, where)
    algorithm, _, expected = diff_id.partition(":")
    digest = hashlib.new(algorithm)
    total = 0
    for chunk in _decompress(verified, where):
        total += len(chunk)
        if total > most_bytes:
            raise IntegrityError(f"{where}: has more than {most_bytes} bytes when decompressed: not taken")
        digest.update(chunk)
        yield chunk
    verified.finish()
    if digest.hexdigest() != expected:
        raise DigestMismatch(f"{where}: its content is not the one that the image's configuration names")


class _Verified:
    """A stream that is checked against its descriptor."""

    def __init__(self, stream: ByteStream, layer: Descriptor, where: str) -> None:
        self._stream = stream
        self._where = where
        self._size = self._left = layer.size
        algorithm, _, self._expected = layer.digest.partition(":")
        self._digest = hashlib.new(algorithm)
        self._held = b""  # read, and to be given once more

    def peek(self, size: int) -> bytes:
        """The first bytes; they come again."""
        while len(self._held) < size:
            more = self._take(size - len(self._held))
            if not more:
                break
            self._held += more
        return self._held

    def read(self, size: int = -1) -> bytes:
        if self._held:
            held, self._held = self._held, b""
            return held  # at most a chunk, as that is what was read
        return self._take(CHUNK_BYTES if size < 0 else size)

    def give_back(self, data: bytes) -> None:
        """What was read and belongs to what comes."""
        self._held = data

    def finish(self) -> None:
        """When the archive has ended: the rest, which decompressors do not ask for, and the sums."""
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
    """By the first bytes: media types are wrong at times, and other tools look at these as well."""
    begin = source.peek(4)
    if begin.startswith(_GZIP):
        return _gunzip(source, where)
    if begin == _ZSTD or (begin[1:] == _ZSTD_SKIPPABLE and begin[0] & 0xF0 == 0x50):
        return _unzstd(source, where)
    return iter(lambda: source.read(CHUNK_BYTES), b"")


def _gunzip(source: _Verified, where: str) -> Iterator[bytes]:
    """One gzip member after the other; zeros may follow."""
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
    """One frame after the other. That the last one is whole is seen by the digest of what is in it."""
    zstandard = compression.library()
    decompressor = zstandard.ZstdDecompressor(max_window_size=MOST_WINDOW_BYTES)
    try:
        with decompressor.stream_reader(
            source, read_size=CHUNK_BYTES, read_across_frames=True, closefd=False
        ) as reader:
            while chunk := reader.read(CHUNK_BYTES):
                yield chunk
    except zstandard.ZstdError as error:
        raise IntegrityError(f"{where}: cannot be decompressed: {error}") from error
