"""PURE: a file of which only some ranges were read, for parsers that find out as they go what they need.

In: ranges. Out: bytes; `Unread` names what has to be read before the parser can be run again; `Torn` says why the
file is not whole. So a parser is an ordinary function, and whoever runs it reads as little as it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

LEAST_BYTES = 4096  # that are asked for at once: neighbours are wanted next


class Unread(Exception):  # noqa: N818  no error: an order
    """Ranges (offset, length) that are needed."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class Torn(Exception):  # noqa: N818  named for what was found
    """The file is not what its saver meant to write; the text continues its name."""


class Parts:
    """Bytes of a file by range."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._have: list[tuple[int, bytes]] = []

    @classmethod
    def of(cls, data: bytes) -> Parts:
        """A file that was read whole."""
        found = cls(len(data))
        found.put(0, data)
        return found

    def put(self, offset: int, data: bytes) -> None:
        self._have.append((offset, data))

    def get(self, offset: int, length: int) -> bytes:
        """Raises: Torn past the end; Unread."""
        found = self._find(offset, length)
        if found is None:
            raise Unread([self._widened(offset, length)])
        return found

    def need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Has them read at once. Raises: Torn; Unread."""
        missing = [self._widened(*each) for each in ranges if self._find(*each) is None]
        if missing:
            raise Unread(missing)

    def _find(self, offset: int, length: int) -> bytes | None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise Torn(f"ends at {self.size} bytes, before what it promises")
        for start, data in self._have:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return None

    def _widened(self, offset: int, length: int) -> tuple[int, int]:
        return offset, min(self.size - offset, max(length, LEAST_BYTES))


class Cursor:
    """A file to read from start to end, as `pickle` wants it."""

    def __init__(self, parts: Parts, at: int = 0, piece_bytes: int = 64 << 10) -> None:
        self.at = at
        self._parts = parts
        self._piece_bytes = piece_bytes  # a range in which small reads are answered
        self._piece_at, self._piece = at, b""

    def read(self, length: int) -> bytes:
        offset = self.at - self._piece_at
        if offset + length > len(self._piece):
            self._piece_at, offset = self.at, 0
            wanted = min(max(length, self._piece_bytes), self._parts.size - self.at)
            self._piece = self._parts.get(self.at, max(length, wanted))
        self.at += length
        return self._piece[offset : offset + length]

    def readline(self) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n"):
            line += self.read(1)
        return bytes(line)


def number(parts: Parts, offset: int, length: int) -> int:
    """An unsigned little-endian number."""
    return int.from_bytes(parts.get(offset, length), "little")


Parser = Callable[[Parts], object]
