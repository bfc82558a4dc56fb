"""Events: what happened when, as JSON lines, one file a process; docs/events.md lists the fields.

In: spans (both ends are written, so a crash leaves an open one, which is evidence), instants, scalars. Out: lines
appended to a file, each with a single write. Writing never disturbs the caller; reading takes any file, also one
that was cut off. Ranks write the same lines by launcher/inside.py, which cannot import this.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from enum import Enum

from bootseer.light_typing import Any, NamedTuple

VERSION = 1
MOST_LINE_BYTES = 1024 * 1024
MOST_NAME_BYTES = 100  # of a host name in a file name
RUN_EVENTS_NAME = "run.jsonl"  # of all nodes, on the node of the coordinator


class Stage(Enum):
    """Parts of a start, in their usual order."""

    QUEUE = "queue"
    ALLOCATE = "allocate"
    IMAGE = "image"
    ENV = "env"
    CACHES = "caches"
    RENDEZVOUS = "rendezvous"
    SPAWN = "spawn"
    IMPORT = "import"
    CHECKPOINT = "checkpoint"
    FIRST_STEP = "first_step"


class Kind(Enum):
    BEGIN = "begin"  # of a span
    END = "end"
    INSTANT = "instant"
    SCALAR = "scalar"


# Names of instants that summaries look for; docs/events.md says who writes them.
RANK_STARTED = "rank_started"  # by the agent, stage spawn: exec of the rank succeeded
RANK_EXITED = "rank_exited"  # by the agent
SCRIPT = "script"  # by the rank, stage spawn: its script's first statement is next
# A scalar.
EVENTS_DROPPED = "events_dropped"  # by the coordinator, in the run file: lines of a node that are not in it
# In each line of a scalar that belongs to no stage, as all writers write it: heartbeats, mostly.
BEAT_MARK = b'"stage":null,"kind":"scalar"'


class Event(NamedTuple):
    """One line of an event file; fields that a line does not have are None or empty."""

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
    attrs: Mapping[str, Any] = {}
    job_ns: int | None = None  # only in a run file: mono_ns by the coordinator's monotonic clock
    job_error_ns: int | None = None  # bound of its error


# ---- writing -------------------------------------------------------------------------------------------------


class EventWriter:
    """Appends events of one process to `path` ("" for none). `dropped` counts events that could not be written.

    `attempt` may be set anew; the file is opened at the first event and closed by `close`. A file that is another
    process's (`is_others`) is never made, and no link is followed to it.
    """

    def __init__(
        self,
        path: str,
        run_id: str,
        node: str,
        rank: int | None = None,
        attempt: int | None = None,
        is_others: bool = False,
    ) -> None:
        self.path = path
        self.run_id = run_id
        self.node = node
        self.rank = rank
        self.attempt = attempt
        self.dropped = 0
        self._flags = os.O_NOFOLLOW | os.O_NONBLOCK if is_others else os.O_CREAT
        self._fd = -1
        self._spans = 0
        self._is_torn = False  # the last line was cut off by a full disk

    def begin(
        self,
        stage: Stage | None,
        name: str,
        *,
        parent: str | None = None,
        mono_ns: int | None = None,
        **attrs: object,
    ) -> str:
        """Opens a span and returns its id."""
        self._spans += 1
        attempt = "" if self.attempt is None else f"{self.attempt}."  # writers of several attempts share a file
        span = f"{name}-{attempt}{self._spans}"
        self.write(stage, Kind.BEGIN, name, span=span, parent=parent, mono_ns=mono_ns, attrs=attrs)
        return span

    def end(
        self,
        stage: Stage | None,
        name: str,
        span: str,
        *,
        error: str | None = None,
        mono_ns: int | None = None,
        **attrs: object,
    ) -> None:
        """Closes a span."""
        self.write(stage, Kind.END, name, span=span, error=error, mono_ns=mono_ns, attrs=attrs)

    def instant(
        self,
        stage: Stage | None,
        name: str,
        *,
        rank: int | None = None,
        error: str | None = None,
        mono_ns: int | None = None,
        **attrs: object,
    ) -> None:
        """Something that happened; `rank` where an agent speaks of one of its ranks."""
        self.write(stage, Kind.INSTANT, name, rank=rank, error=error, mono_ns=mono_ns, attrs=attrs)

    def scalar(
        self, stage: Stage | None, name: str, value: float, unit: str | None = None, *, mono_ns: int | None = None
    ) -> None:
        """A measured number."""
        self.write(stage, Kind.SCALAR, name, value=value, unit=unit, mono_ns=mono_ns)

    def write(
        self,
        stage: Stage | None,
        kind: Kind,
        name: str,
        *,
        rank: int | None = None,
        mono_ns: int | None = None,
        attrs: Mapping[str, object] | None = None,
        **fields: object,
    ) -> None:
        """Appends one event; `mono_ns` when it happened earlier than now."""
        if not self.path:
            return
        wall_ns, now_ns = time.time_ns(), time.monotonic_ns()
        if mono_ns is not None:
            wall_ns, now_ns = wall_ns - (now_ns - mono_ns), mono_ns
        line: dict[str, object] = {
            "v": VERSION,
            "wall_ns": wall_ns,
            "mono_ns": now_ns,
            "run_id": self.run_id,
            "node": self.node,
            "rank": self.rank if rank is None else rank,
            "attempt": self.attempt,
            "stage": None if stage is None else stage.value,
            "kind": kind.value,
            "name": name,
        }
        line.update((key, value) for key, value in fields.items() if value is not None)
        if attrs:
            line["attrs"] = attrs
        try:
            self._append(to_json(line).encode("utf-8", "backslashreplace") + b"\n")
        except Exception:  # also a value whose text cannot be made: events never disturb what they describe
            self.dropped += 1

    def close(self) -> None:
        """Closes the file; a later event opens it again."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            try:
                os.close(fd)
            except OSError:
                pass

    def _append(self, data: bytes) -> None:
        if self._fd < 0:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | self._flags, 0o644)
        if self._is_torn:
            data = b"\n" + data
        written = os.write(self._fd, data)
        self._is_torn = written < len(data)
        self.dropped += self._is_torn


def to_json(value: object) -> str:
    """JSON text of plain values; others become their repr. Module json would take 5 ms of each start."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return float.__repr__(value) if value - value == 0 else "null"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{to_json(str(key))}:{to_json(each)}" for key, each in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(to_json, value)) + "]"
    text = value if isinstance(value, str) else repr(value)
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return f'"{text}"'
    return '"' + "".join(map(_escape, text)) + '"'


def _escape(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return f"\\u{ord(char):04x}" if char < " " or "\ud800" <= char <= "\udfff" else char


# ---- reading -------------------------------------------------------------------------------------------------


def read_events(path: str, without: bytes | None = None) -> Iterator[Event]:
    """The events of a file in its order; what is cut off, too long or no event is passed over. No file: none.

    Args: without: lines that hold this are passed over too, at a hundredth of the cost.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError:
        return  # not there, or its disk is in trouble: what was not read is not observed
    with file:
        is_rest = False  # of a line that is too long
        while line := file.readline(MOST_LINE_BYTES):
            is_whole = line.endswith(b"\n")
            if not is_rest and is_whole and (without is None or without not in line):
                event = parse_event(line)
                if event is not None:
                    yield event
            is_rest = not is_whole


def parse_event(line: bytes) -> Event | None:
    """One line as an event; None for anything else."""
    import json

    try:
        found = json.loads(line)
        if not isinstance(found, dict) or found.pop("v") != VERSION:
            return None
        event = Event(**{name: found[name] for name in Event._fields if name in found})
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return event if all(map(_has_type, event, _TYPES)) else None


_NUMBER, _TEXT, _NONE = (int, float), str, type(None)
_TYPES: tuple[tuple[type, ...], ...] = (
    (int,),
    (int,),
    (_TEXT,),
    (_TEXT,),
    (int, _NONE),
    (int, _NONE),
    (_TEXT, _NONE),
    (_TEXT,),
    (_TEXT,),
    (_TEXT, _NONE),
    (_TEXT, _NONE),
    (*_NUMBER, _TEXT, _NONE),
    (_TEXT, _NONE),
    (_TEXT, _NONE),
    (dict,),
    (int, _NONE),
    (int, _NONE),
)


def _has_type(value: object, types: tuple[type, ...]) -> bool:
    return isinstance(value, types) and not isinstance(value, bool)


# ---- files ---------------------------------------------------------------------------------------------------


def agent_events_path(events_dir: str, node: str) -> str:
    """The file of the agent on `node`."""
    return f"{events_dir}/agent-{safe_name(node)}.jsonl"


def rank_events_path(events_dir: str, node: str, rank: int, attempt: int) -> str:
    """The file of one rank in one attempt."""
    return f"{events_dir}/rank-{rank}-attempt-{attempt}-{safe_name(node)}.jsonl"


def run_events_path(events_dir: str) -> str:
    """The file of the coordinator with the events of all nodes."""
    return f"{events_dir}/{RUN_EVENTS_NAME}"


def safe_name(text: str) -> str:
    """`text` as part of a file name: bounded, and without characters that a path or a shell minds."""
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in text)
    return kept[:MOST_NAME_BYTES] or "_"
