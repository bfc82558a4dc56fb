"""The events of a running job as they are written: each whole line once, with a number to resume from.

In: the directory of the job's events; the run's file where there is one, else those of agents and ranks. Out:
lines of JSON, numbered. Scalars (heartbeats) are left out: the status has what they say. Files are untrusted: a
line that is no event of the run is skipped, an incomplete one waits for its rest, memory is bounded.
"""

from __future__ import annotations

import os
import secrets
from collections import Counter, deque
from itertools import islice
from typing import NamedTuple

import msgspec

from bootseer.events import BEAT_MARK, MAX_LINE_BYTES, RUN_EVENTS_NAME, VERSION, Kind
from bootseer.report.finding import is_event_file, open_regular

MAX_KEPT_BYTES = 4 << 20
MAX_KEPT_LINES = 20_000
MAX_FILES = 20_000
MAX_COUNTS = 1000  # different events
READ_BYTES = 1 << 20  # at a time, so that a large file does not fill the memory
MAX_POLL_BYTES = 16 << 20  # in one call of `poll`; the rest follows with the next


class LoggedEvent(NamedTuple):
    """An event of a job."""

    number: int  # from 1, in the order in which it was seen
    line: bytes  # JSON, without a line end


class _Line(msgspec.Struct, gc=False):
    """The fields by which a line is judged."""

    v: int
    wall_ns: int
    run_id: str
    kind: str
    name: str
    stage: str | None = None


class EventLog:
    """The events of one run. `poll` reads files, so it belongs into a thread; all else is memory."""

    def __init__(self, directory: str, run_id: str, since_ns: int = 0) -> None:
        """Args: since_ns: wall clock; older events are of an earlier job with the same id."""
        self.directory, self._run_id, self._since_ns = directory, run_id, since_ns
        self.epoch = secrets.token_hex(4)  # of the numbers
        self._decode = msgspec.json.Decoder(_Line).decode
        self._files: dict[str, _Tail] = {}
        self._kept: deque[LoggedEvent] = deque()
        self._kept_bytes = 0
        self.last = 0  # number of the newest event
        self.counts: Counter[tuple[str, str]] = Counter()  # instants so far, by name and stage
        self.skipped = 0  # lines that were no events of this run

    @property
    def first(self) -> int:
        """The number of the oldest event that is kept."""
        return self._kept[0].number if self._kept else self.last + 1

    def after(self, number: int) -> list[LoggedEvent]:
        """Return the kept events after this number."""
        newer = self.last - number
        if newer <= 0:
            return []
        return list(islice(self._kept, max(0, len(self._kept) - newer), None))

    def poll(self) -> bool:
        """Read what was added to the files; return whether there is more to read at once. Raises: OSError."""
        left = MAX_POLL_BYTES
        names = self._list()
        if names == [RUN_EVENTS_NAME] and self._files.keys() - {RUN_EVENTS_NAME}:
            self._begin_anew()
        for name in names:
            tail = self._files.setdefault(name, _Tail(os.path.join(self.directory, name)))
            while left > 0 and (lines := tail.read(min(READ_BYTES, left))) is not None:
                left -= tail.last_bytes
                for line in lines:
                    self._add(line)
        return left <= 0

    def _begin_anew(self) -> None:
        """Forget what the files of nodes told: the run's file, which has come, tells all of it."""
        self.epoch = secrets.token_hex(4)
        self._files.clear()
        self._kept.clear()
        self._kept_bytes = self.last = 0
        self.counts.clear()

    def _list(self) -> list[str]:
        with os.scandir(self.directory) as entries:
            names = [entry.name for entry in entries if is_event_file(entry.name)][:MAX_FILES]
        # The run's file has the events of all nodes.
        return [RUN_EVENTS_NAME] if RUN_EVENTS_NAME in names else sorted(names)

    def _add(self, line: bytes) -> None:
        if BEAT_MARK in line:
            return
        try:
            found = self._decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            self.skipped += 1
            return
        if found.v != VERSION or found.run_id != self._run_id or found.wall_ns < self._since_ns:
            self.skipped += 1
            return
        if found.kind == Kind.INSTANT.value and len(self.counts) < MAX_COUNTS:
            self.counts[found.name, found.stage or ""] += 1
        self.last += 1
        self._kept.append(LoggedEvent(self.last, line))
        self._kept_bytes += len(line)
        while self._kept_bytes > MAX_KEPT_BYTES or len(self._kept) > MAX_KEPT_LINES:
            self._kept_bytes -= len(self._kept.popleft().line)


class _Tail:
    """What is added to one file."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._at = 0
        self._rest = b""
        self._is_long = False  # the beginning of this line was dropped
        self.last_bytes = 0

    def read(self, max_bytes: int) -> list[bytes] | None:
        """Return whole new lines; None if there is nothing new."""
        try:
            if os.stat(self._path).st_size <= self._at:
                return None
            fd = open_regular(self._path)
        except OSError:
            return None  # it is gone, or not readable yet
        try:
            data = os.pread(fd, max_bytes, self._at)
        finally:
            os.close(fd)
        if not data:
            return None
        self._at += len(data)
        self.last_bytes = len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines and self._is_long:
            del lines[0]
            self._is_long = False
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest, self._is_long = b"", True
        return [line for line in lines if 0 < len(line) <= MAX_LINE_BYTES]
