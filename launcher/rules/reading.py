"""What a rank has written to its log files since the last look, in lines; never more than a look may cost.

Reads the files only, so no rank waits for it. Of a flood the newest lines are read, the rest is left out.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from launcher.ranks.follow import Cursor, Source, dress
from launcher.ranks.logs import RankLogs


class Batch(NamedTuple):
    """New lines of a rank."""

    lines: list[str]
    skipped_bytes: int


class RankReader:
    """Of one rank. Its methods raise OSError."""

    def __init__(self, rank: int, logs: RankLogs) -> None:
        self.rank = rank
        paths = (logs.stdout_path, logs.stderr_path)
        self._cursors = [Cursor(Source(path)) for path in paths if path is not None and path != os.devnull]

    @property
    def files(self) -> int:
        """How many there are to read."""
        return len(self._cursors)

    def read(self, most_bytes: int) -> Batch:
        """Args: most_bytes: of each file; a line that is longer is read all the same, up to 1 MiB."""
        lines: list[str] = []
        skipped_bytes = 0
        for cursor in self._cursors:
            cursor.source.open()
            size = os.fstat(cursor.source.fd).st_size
            left_out = cursor.skip(size - most_bytes) if size - cursor.offset > most_bytes else 0
            parts: list[bytes] = []
            while sum(map(len, parts)) < most_bytes and (part := cursor.take()):
                parts.append(part)
            body = b"".join(parts)
            if left_out:
                body = body[body.find(b"\n") + 1 :]  # it began within a line
            skipped_bytes += left_out
            lines += [line for line in dress(body, b"").decode(errors="replace").split("\n") if line]
        return Batch(lines, skipped_bytes)

    def end(self) -> None:
        """The rank writes no more: what is left counts as a line."""
        for cursor in self._cursors:
            cursor.source.ended = True

    def close(self) -> None:
        for cursor in self._cursors:
            cursor.source.close()
