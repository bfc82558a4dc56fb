"""PURE: which bytes of which files a TensorStore OCDBT database needs; Orbax stores arrays in one.

In: the manifest, then nodes of its tree on request. Out: where further nodes are, and where values end.
Source: google.github.io/tensorstore/kvstore/ocdbt, "Storage format". Nodes are compressed with Zstandard.
"""

from __future__ import annotations

from typing import NamedTuple

from bootseer.checkpoint.format.file_parts import IncompleteFile
from bootseer.crc import crc32c

MANIFEST_NAME = "manifest.ocdbt"
_MANIFEST, _NODE = 0x0CDB3A2A, 0x0CDB20DE
_MAX_UNPACKED_BYTES = 64 << 20
_MAX_ITEMS = 1 << 22


class FileRange(NamedTuple):
    """A range of a file; paths are relative to the manifest's directory."""

    path: str
    offset: int
    length: int
    base: str = ""  # prefix of the paths that the node there names

    @property
    def end(self) -> int:
        return self.offset + self.length


class Node(NamedTuple):
    nodes: list[FileRange]
    values: list[FileRange]
    is_packed: bool = False  # values are compressed with Zstandard, by metadata in the node


def read_manifest(data: bytes) -> list[FileRange]:
    """Return the place of the newest version's root; empty for an empty database. Raises: Torn."""
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
    """Return the references of a node. Raises: Torn."""
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
        raise IncompleteFile("is not a file of its array database")
    if int.from_bytes(data[4:12], "little") != len(data):
        raise IncompleteFile(
            f"has {len(data)} bytes, but its database needs {int.from_bytes(data[4:12], 'little')}"
        )
    if crc32c(data[:-4]) != int.from_bytes(data[-4:], "little"):
        raise IncompleteFile("is damaged: its CRC-32C does not match")
    if data[12] or data[13] > 1:
        raise IncompleteFile("has a format that is newer than supported")
    return _unzstd(data[14:-4]) if data[13] else data[14:-4]


def _unzstd(frame: bytes) -> bytes:
    try:
        import zstandard
    except ModuleNotFoundError as error:
        raise CodecMissing from error
    try:
        if zstandard.frame_content_size(frame) > _MAX_UNPACKED_BYTES:
            raise IncompleteFile("is damaged: its declared size is too large")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=_MAX_UNPACKED_BYTES)
    except zstandard.ZstdError as error:
        raise IncompleteFile("is damaged: it cannot be unpacked") from error


class CodecMissing(Exception):  # noqa: N818  not an error of the database
    """The database cannot be read without the library zstandard."""


class _Body:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def skip(self, length: int) -> bytes:
        found = self._data[self._at : self._at + length]
        if len(found) != length:
            raise IncompleteFile("is damaged: a node ends too early")
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
                raise IncompleteFile("is damaged: a number is too long")

    def column(self, count: int) -> list[int]:
        if not 0 <= count <= _MAX_ITEMS:
            raise IncompleteFile("is damaged: a node has too many entries")
        return [self.varint() for _ in range(count)]

    def files(self, base: str) -> list[tuple[str, str]]:
        """Read the file table: paths, and the prefix of the paths that each file names."""
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

    def place(self, files: list[tuple[str, str]], number: int, offset: int, length: int) -> FileRange:
        if number >= len(files):
            raise IncompleteFile("is damaged: it names a file that is not in its table")
        path, base = files[number]
        return FileRange(path, offset, length, base)
