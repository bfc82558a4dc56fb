"""Reader of a growing log file in whole lines; it holds none of it in memory between reads.

In: a path. Out: batches of complete lines, with a prefix. Knows nothing of loops and consoles; tail.py decides
when to read. Carriage returns end lines as newlines do, because progress bars write only those.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

READ_BYTES = 64 << 10
MAX_LINE_BYTES = 1 << 20  # a longer line is cut into lines of this size


class LogFile:
    """A log file: one descriptor and one watch for all its readers."""

    __slots__ = ("ended", "fd", "path", "watch")

    def __init__(self, path: str) -> None:
        self.path = path
        self.fd = -1
        self.watch = -1
        self.ended = False  # no process writes it any more

    def open(self) -> None:
        """Open the file; create it if the rank has not started yet."""
        if self.fd < 0:
            flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            self.fd = os.open(self.path, flags if self.ended else flags | os.O_CREAT, 0o644)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class LogCursor:
    """A position in a source up to which its lines have been taken."""

    __slots__ = ("_scanned", "offset", "source")

    def __init__(self, source: LogFile) -> None:
        self.source = source
        self.offset = 0  # start of the first line not taken yet
        self._scanned = 0  # no line ends between offset and here

    def take(self) -> bytes:
        """Return the next lines, at most about READ_BYTES unless one is longer; empty if there are none now."""
        fd = self.source.fd
        while True:
            data = os.pread(fd, READ_BYTES, self._scanned)
            end = find_end(data)
            if end:
                whole = self._scanned == self.offset
                return self._advance(self._scanned + end, data[:end] if whole else None)
            grown = len(data) - data.endswith(b"\r")  # a newline may follow it
            self._scanned += grown
            if self._scanned - self.offset >= MAX_LINE_BYTES:
                return self._advance(self.offset + MAX_LINE_BYTES) + b"\n"
            if not grown:
                return self._take_rest(len(data))

    def skip(self, offset: int) -> int:
        """Move to a later position, which may be within a line. Returns: bytes skipped."""
        left_out, self.offset = offset - self.offset, offset
        self._scanned = offset
        return left_out

    def count_left(self) -> int:
        """Return the number of bytes of the file that have not been taken."""
        try:
            return max(0, os.stat(self.source.path).st_size - self.offset)
        except OSError:
            return 0

    def _take_rest(self, held_bytes: int) -> bytes:
        size = os.fstat(self.source.fd).st_size
        if size < self._scanned:  # truncated by another process: start again with the present content
            self.offset = self._scanned = 0
            return self.take() if size else b""
        end = self._scanned + held_bytes
        if not self.source.ended or end == self.offset:
            return b""
        return self._advance(end) + b"\n"

    def _advance(self, end: int, body: bytes | None = None) -> bytes:
        if body is None:
            body = os.pread(self.source.fd, end - self.offset, self.offset)
        self.offset = self._scanned = end
        return body


def find_end(data: bytes) -> int:
    """Return the offset after the last line end in `data`; a final carriage return may be half of one."""
    return max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1) if data else -1) + 1


def add_prefix(body: bytes, prefix: bytes, needles: Iterable[bytes] = ()) -> bytes:
    """Return lines with the prefix on each; if `needles` is given, only lines that hold one of them."""
    if b"\r" in body:
        body = _split_returns(body)
    if needles:
        lines = body.splitlines(keepends=True)
        body = b"".join(line for line in lines if any(needle in line for needle in needles))
    if not prefix or not body:
        return body
    return prefix + body[:-1].replace(b"\n", b"\n" + prefix) + b"\n"


def count_without_prefix(dressed: bytes, prefix: bytes) -> int:
    """Return how many bytes of the log file a dressed batch, or the end of one, stands for."""
    return len(dressed) - dressed.count(b"\n") * len(prefix)


def _split_returns(body: bytes) -> bytes:
    """Make a line of each part between carriage returns that has text."""
    *lines, last = body.replace(b"\r\n", b"\n").split(b"\n")
    parts: list[bytes] = []
    for line in lines:
        parts += [part for part in line.split(b"\r") if part] or [b""]
    parts += [part for part in last.split(b"\r") if part]
    return b"".join(part + b"\n" for part in parts)
