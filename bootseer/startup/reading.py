"""Event files of a job, of whatever size -> its events, each once.

In: paths. Out: events in a fixed order and notes about what could not be read. Files come from outside: they may
be cut off, damaged, huge, or no event files at all; time and memory stay bounded, and what was left out is said.
The run's file comes first: it has the coordinator's time; what files of nodes have beyond it is added. Decoded by
msgspec, which takes a tenth of the time of module json.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from bootseer.events import MOST_LINE_BYTES, RUN_EVENTS_NAME, VERSION, Event, Kind
from bootseer.formats import one_line
from bootseer.startup.finding import list_files, open_regular

MOST_FILE_BYTES = 1024 * 1024 * 1024
MOST_RANK_BYTES = 64 * 1024 * 1024  # of a rank's file: its start lies at the beginning
TAIL_BYTES = 64 * 1024  # of a longer one: when it was last seen
MOST_EVENTS = 2_000_000
BAD_LINES, BAD_BYTES = 10_000, 16 * 1024 * 1024  # more than of good ones: not worth reading on
MOST_ATTRS, MOST_ATTR_CHARS = 32, 300
LARGE_LINE_BYTES = 4096
MOST_NAMES = 100_000
MOST_NS = 2**62  # clocks do not say more
MOST_RANK, MOST_ATTEMPT = 10**7, 10**6
_HEARTBEAT = "heartbeat"

Key = tuple[str, int | None, int | None]


class EventsRead(NamedTuple):
    """What a job's files hold."""

    events: list[Event]  # by node and time
    notes: list[str]  # for people: what was left out


class _Line(msgspec.Struct, gc=False):
    v: int
    wall_ns: int
    mono_ns: int
    run_id: str
    node: str
    rank: int | None
    attempt: int | None
    stage: str | None
    kind: str
    name: str
    span: str | None = None
    parent: str | None = None
    value: float | str | None = None
    unit: str | None = None
    error: str | None = None
    attrs: dict[str, Any] = {}  # msgspec copies it
    job_ns: int | None = None
    job_error_ns: int | None = None


def read_job(paths: Iterable[str]) -> EventsRead:
    """The events of the folders or files of one job."""
    files = [file for path in paths for file in list_files(path)]
    reader = EventReader()
    for file in sorted(files, key=lambda file: os.path.basename(file) != RUN_EVENTS_NAME):
        reader.read(file)
    return reader.finish()


class EventReader:
    """Reads file after file; `finish` gives what they hold together."""

    def __init__(
        self,
        most_events: int = MOST_EVENTS,
        most_file_bytes: int = MOST_FILE_BYTES,
        most_rank_bytes: int = MOST_RANK_BYTES,
    ) -> None:
        self._decode = msgspec.json.Decoder(_Line).decode
        self._most_events = most_events
        self._most_file_bytes = most_file_bytes
        self._most_rank_bytes = most_rank_bytes
        self._events: list[Event] = []
        self._beats: dict[Key, Event] = {}  # the last heartbeat of each rank: there may be millions
        self._seen: set[int] = set()
        self._names: dict[str, str] = {}
        self._notes: list[str] = []
        self._bad_lines = 0

    def read(self, file: str) -> None:
        """Adds the events of one file."""
        if self._is_full():
            return
        name = one_line(os.path.basename(file))
        try:
            fd = open_regular(file)
        except OSError as error:
            self._notes.append(f"{name} could not be read: {one_line(error.strerror or str(error))}")
            return
        with open(fd, "rb") as source:
            most = self._most_rank_bytes if name.startswith("rank-") else self._most_file_bytes
            size = os.fstat(fd).st_size
            if not self._read_part(source, min(size, most)):
                self._notes.append(f"{name} holds little that is an event: the rest of it was not read")
            elif size > most:
                source.seek(max(most, size - TAIL_BYTES))
                source.readline(MOST_LINE_BYTES)
                self._read_part(source, TAIL_BYTES)
                self._notes.append(f"{name} has more than {most:,} bytes: only its beginning and end were read")
        if self._is_full():
            self._notes.append(f"more than {self._most_events:,} events: {name} and what follows was left out")

    def finish(self) -> EventsRead:
        """All events, in an order that does not depend on the files'."""
        if self._bad_lines:
            what = "line is no event" if self._bad_lines == 1 else "lines are no events"
            self._notes.append(f"{self._bad_lines:,} {what} (cut off, damaged or of another version)")
        events = [*self._events, *self._beats.values()]
        events.sort(key=_order)
        return EventsRead(events, self._notes)

    def _read_part(self, source: Any, most_bytes: int) -> bool:
        """Whether it was worth reading to the end."""
        good_lines = good_bytes = bad_lines = bad_bytes = 0
        is_rest = False  # of a line that is too long
        add = self._add
        while most_bytes > 0 and (line := source.readline(MOST_LINE_BYTES)):
            most_bytes -= len(line)
            is_whole = line.endswith(b"\n")
            if is_whole and not is_rest and add(line):
                good_lines += 1
                good_bytes += len(line)
                if self._is_full():
                    break
            elif is_whole or len(line) == MOST_LINE_BYTES:  # else it is being written
                bad_lines += 1
                bad_bytes += len(line)
                if bad_lines > BAD_LINES + good_lines or bad_bytes > BAD_BYTES + good_bytes:
                    self._bad_lines += bad_lines
                    return False
            is_rest = not is_whole
        self._bad_lines += bad_lines
        return True

    def _is_full(self) -> bool:
        return len(self._events) >= self._most_events

    def _add(self, line: bytes) -> bool:
        try:
            found = self._decode(line)
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            return False
        rank, attempt, job_ns, error_ns = found.rank, found.attempt, found.job_ns, found.job_error_ns
        if (
            found.v != VERSION
            or not 0 <= found.mono_ns < MOST_NS
            or not 0 <= found.wall_ns < MOST_NS
            or (rank is not None and not 0 <= rank < MOST_RANK)
            or (attempt is not None and not 0 <= attempt < MOST_ATTEMPT)
        ):
            return False
        if (
            job_ns is None
            or error_ns is None
            or not -MOST_NS < job_ns < MOST_NS
            or not 0 <= error_ns < MOST_NS // 2
        ):
            job_ns = error_ns = None
        node, kind, name = self._name(found.node), found.kind, self._name(found.name)
        key = hash((node, rank, attempt, kind, name, found.mono_ns, found.span, found.value))
        if key in self._seen:
            return True  # the run's file and the node's own have it
        self._seen.add(key)
        event = Event(
            found.wall_ns,
            found.mono_ns,
            self._name(found.run_id),
            node,
            rank,
            attempt,
            None if found.stage is None else self._name(found.stage),
            kind,
            name,
            None if found.span is None else self._name(found.span),
            found.parent,
            found.value,
            None if found.unit is None else self._name(found.unit),
            None if found.error is None else one_line(found.error),
            found.attrs if len(line) <= LARGE_LINE_BYTES else _cut(found.attrs),
            job_ns,
            error_ns,
        )
        if kind == Kind.SCALAR.value and name == _HEARTBEAT:
            self._seen.discard(key)
            last = self._beats.get((node, rank, attempt))
            if last is None or event.mono_ns > last.mono_ns:
                self._beats[node, rank, attempt] = event
        else:
            self._events.append(event)
        return True

    def _name(self, text: str) -> str:
        """One copy of each name, without what a terminal would obey."""
        known = self._names.get(text)
        if known is None:
            if len(self._names) >= MOST_NAMES:
                self._names.clear()
            known = self._names[text] = one_line(text)
        return known


def _order(event: Event) -> tuple[Any, ...]:
    rank = -1 if event.rank is None else event.rank
    is_end = event.kind == Kind.END.value
    # Of one moment: spans open before they close.
    return event.node, event.mono_ns, is_end, rank, event.name, event.kind, event.span or ""


def _cut(attrs: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in attrs.items():
        if len(kept) >= MOST_ATTRS:
            break
        if isinstance(value, str):
            kept[name[:MOST_ATTR_CHARS]] = value[:MOST_ATTR_CHARS]
        elif value is None or isinstance(value, bool | int | float):
            kept[name[:MOST_ATTR_CHARS]] = value
    return kept
