"""What a rank has written to its log files since the last look, in lines; never more than a look may cost.

Reads the files only, so no rank waits for it. Of a flood the newest lines are read, the rest is left out. The
numbers of its heartbeats, which are in its event file, come as lines as well: `heartbeat step=7 loss=0.5`.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

from launcher.ranks.follow import Cursor, Source, dress
from launcher.ranks.logs import RankLogs


class Batch(NamedTuple):
    """New lines of a rank."""

    lines: list[str]
    skipped_bytes: int
    beats: list[str]  # its heartbeats


class RankReader:
    """Of one rank. Its methods raise OSError."""

    def __init__(self, rank: int, logs: RankLogs, events_file: str = "") -> None:
        """Args: events_file: that the rank itself writes; "" for none."""
        self.rank = rank
        self._beats = Cursor(Source(events_file)) if events_file else None
        paths = (logs.stdout_path, logs.stderr_path)
        self._cursors = [Cursor(Source(path)) for path in paths if path is not None and path != os.devnull]

    @property
    def files(self) -> int:
        """How many log files there are to read."""
        return len(self._cursors)

    @property
    def is_read(self) -> bool:
        """Whether there is anything to read."""
        return bool(self._cursors or self._beats)

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
        return Batch(lines, skipped_bytes, self._read_beats(most_bytes))

    def _read_beats(self, most_bytes: int) -> list[str]:
        cursor = self._beats
        if cursor is None:
            return []
        if cursor.source.fd < 0:
            try:  # whoever makes the file owns it, and that is the rank
                cursor.source.fd = os.open(cursor.source.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                return []
        size = os.fstat(cursor.source.fd).st_size
        if size - cursor.offset > most_bytes:
            cursor.skip(size - most_bytes)
        return [line for event in cursor.take().split(b"\n") if (line := describe_beat(event))]

    def end(self) -> None:
        """The rank writes no more: what is left counts as a line."""
        for cursor in self._all():
            cursor.source.ended = True

    def close(self) -> None:
        for cursor in self._all():
            cursor.source.close()

    def _all(self) -> list[Cursor]:
        return self._cursors if self._beats is None else [*self._cursors, self._beats]


def describe_beat(event: bytes) -> str:
    """A heartbeat as a line; "" for what is none, or cannot be read. Args: event: of a rank's event file."""
    if b'"name":"heartbeat"' not in event:
        return ""
    try:
        found: dict[str, Any] = json.loads(event)
        metrics = found.get("attrs", {})
        words = [f"{name}={value}" for name, value in metrics.items() if value is not None]
        return " ".join(["heartbeat", f"step={found.get('value')}", *words])
    except (ValueError, AttributeError, RecursionError):
        return ""
