"""PURE: a file of which only some ranges were read, for parsers that discover step by step which bytes they need.

In: ranges. Out: bytes; `RangesNeeded` names the ranges to read before the parser runs again; `IncompleteFile`
gives the fault of an incomplete file. So a parser is an ordinary function, and its caller reads as little as it
requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

MIN_BYTES = 4096  # of one request: neighbours are needed next


class RangesNeeded(Exception):  # noqa: N818  not an error: a request
    """Ranges (offset, length) that are needed."""

    def __init__(self, ranges: list[tuple[int, int]]) -> None:
        super().__init__(ranges)
        self.ranges = ranges


class IncompleteFile(Exception):  # noqa: N818  named for what was found
    """The file is not as its saver intended; the text continues a sentence that begins with its name."""


class Parts:
    """Bytes of a file by range."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._have: list[tuple[int, bytes]] = []

    @classmethod
    def of(cls, data: bytes) -> Parts:
        """Return the parts of a file that was read whole."""
        found = cls(len(data))
        found.put(0, data)
        return found

    def put(self, offset: int, data: bytes) -> None:
        self._have.append((offset, data))

    def get(self, offset: int, length: int) -> bytes:
        """Return bytes. Raises: IncompleteFile past the end; RangesNeeded."""
        found = self._find(offset, length)
        if found is None:
            raise RangesNeeded([self._widened(offset, length)])
        return found

    def need(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Request ranges together. Raises: IncompleteFile; RangesNeeded."""
        missing = [self._widened(*each) for each in ranges if self._find(*each) is None]
        if missing:
            raise RangesNeeded(missing)

    def _find(self, offset: int, length: int) -> bytes | None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise IncompleteFile(f"ends at byte {self.size}, earlier than its headers promise")
        for start, data in self._have:
            if start <= offset and offset + length <= start + len(data):
                return data[offset - start : offset - start + length]
        return None

    def _widened(self, offset: int, length: int) -> tuple[int, int]:
        return offset, min(self.size - offset, max(length, MIN_BYTES))


class Cursor:
    """A file to read from start to end, with the methods that `pickle` requires."""

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
    """Return an unsigned little-endian number."""
    return int.from_bytes(parts.get(offset, length), "little")


Parser = Callable[[Parts], object]
