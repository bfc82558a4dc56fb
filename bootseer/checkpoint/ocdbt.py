"""PURE: which bytes of which files a database of TensorStore's OCDBT needs, as Orbax keeps arrays in one.

In: the manifest, then nodes of its tree as they are asked for. Out: where further nodes are, and where values end.
Source: google.github.io/tensorstore/kvstore/ocdbt, "Storage format". Nodes are packed by Zstandard.
"""

from __future__ import annotations

from typing import NamedTuple

from bootseer.checkpoint.file_parts import Torn
from bootseer.checkpoint.sums import crc32c

MANIFEST_NAME = "manifest.ocdbt"
_MANIFEST, _NODE = 0x0CDB3A2A, 0x0CDB20DE
_MOST_UNPACKED_BYTES = 64 << 20
_MOST_ITEMS = 1 << 22


class Place(NamedTuple):
    """Bytes of a file; paths are relative to the manifest's folder."""

    path: str
    offset: int
    length: int
    base: str = ""  # before the paths that the node there names

    @property
    def end(self) -> int:
        return self.offset + self.length


class Node(NamedTuple):
    """What a node refers to."""

    nodes: list[Place]
    values: list[Place]
    is_packed: bool = False  # the values, by Zstandard: what is kept in the node itself says so


def read_manifest(data: bytes) -> list[Place]:
    """Where the root of the newest version is, none for an empty database. Raises: Torn."""
    body = _Body(_unpack(data, _MANIFEST))
    body.skip(16)
    if body.varint():
        return []  # versions are in numbered files beside it
    body.column(2)
    body.skip(1)
    if body.varint():
        body.skip(4)
    files = body.files("")
    count = body.varint()
    if not count:
        return []
    body.column(count)
    body.skip(count)
    numbers, offsets, lengths = body.column(count), body.column(count), body.column(count)
    if (numbers[-1], offsets[-1], lengths[-1]) == (0, 0, 0):
        return []
    return [body.place(files, numbers[-1], offsets[-1], lengths[-1])]


def read_node(data: bytes, base: str) -> Node:
    """Raises: Torn."""
    body = _Body(_unpack(data, _NODE))
    height = body.skip(1)[0]
    files = body.files(base)
    count = body.varint()
    if not count:
        return Node([], [])
    body.column(count - 1)
    suffixes = body.column(count)
    if height:
        body.column(count)
        body.skip(sum(suffixes))
        columns = zip(body.column(count), body.column(count), body.column(count), strict=True)
        return Node([body.place(files, *each) for each in columns], [])
    body.skip(sum(suffixes))
    lengths, kinds = body.column(count), body.column(count)
    apart = [length for length, kind in zip(lengths, kinds, strict=True) if kind]
    columns = zip(body.column(len(apart)), body.column(len(apart)), apart, strict=True)
    values = [body.place(files, *each) for each in columns]
    inline = body.skip(sum(lengths) - sum(apart))
    return Node([], values, b'"zstd"' in inline and b'"compressor":null' not in inline)


def _unpack(data: bytes, magic: int) -> bytes:
    if len(data) < 18 or int.from_bytes(data[:4], "big") != magic:
        raise Torn("is not what its database of arrays needs")
    if int.from_bytes(data[4:12], "little") != len(data):
        raise Torn(f"has {len(data)} bytes where its database needs {int.from_bytes(data[4:12], 'little')}")
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise Torn("is damaged: its CRC-32C is another one")
    if data[12] or data[13] > 1:
        raise Torn("is of a newer format than is known")
    return _unzstd(data[14:-4]) if data[13] else data[14:-4]


def _unzstd(frame: bytes) -> bytes:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise Opaque from error
    try:
        if zstandard.frame_content_size(frame) > _MOST_UNPACKED_BYTES:
            raise Torn("is damaged: it says that it is too large")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=_MOST_UNPACKED_BYTES)
    except zstandard.ZstdError as error:
        raise Torn("is damaged: it cannot be unpacked") from error


class Opaque(Exception):  # noqa: N818  no error of the database's
    """Nothing can be said without the library zstandard."""


class _Body:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def skip(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        if len(found) != length:
            raise Torn("is damaged: a node ends too early")
        self._at += length
        return found

    def varint(self) -> int:
        found = shift = 0
        while True:
            byte = self.skip(1)[0]
            found |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return found
            if shift > 63:
                raise Torn("is damaged: a number is too long")

    def column(self, count: int) -> list[int]:
        if not 0 <= count <= _MOST_ITEMS:
            raise Torn("is damaged: a node has too many entries")
        return [self.varint() for _ in range(count)]

    def files(self, base: str) -> list[tuple[str, str]]:
        """Each with what comes before the paths that it names."""
        count = self.varint()
        if not count:
            return []
        prefixes = [0, *self.column(count - 1)]
        suffixes, bases = self.column(count), self.column(count)
        found: list[tuple[str, str]] = []
        path = b""
        for prefix, suffix, own in zip(prefixes, suffixes, bases, strict=True):
            path = path[:prefix] + self.skip(suffix)
            text = path.decode("utf-8", "replace")
            found.append((base + text, base + path[:own].decode("utf-8", "replace")))
        return found

    def place(self, files: list[tuple[str, str]], number: int, offset: int, length: int) -> Place:
        if number >= len(files):
            raise Torn("is damaged: it names a file that is not in its table")
        path, base = files[number]
        return Place(path, offset, length, base)
