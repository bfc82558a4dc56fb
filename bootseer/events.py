"""Events as JSON lines, one file a process; docs/reference/events.md lists the fields.

In: spans (both ends are written, so a crash leaves an open span as evidence), instants, scalars. Out: lines
appended to a file, each with a single write. Writing never disturbs the caller. Reading accepts any file, also one
that was cut off. Ranks write the same lines by launcher/in_rank/bootstrap.py, which cannot import this module.
"""

from __future__ import annotations

import os
import time

from bootseer.light_stdlib import Enum, load_json
from bootseer.light_typing import Any, Iterator, Mapping, NamedTuple

VERSION = 1
MAX_LINE_BYTES = 1024 * 1024
MAX_NAME_BYTES = 100  # of a host name in a file name
RUN_EVENTS_NAME = "run.jsonl"  # of all nodes, on the node of the coordinator


class Stage(Enum):
    """Parts of a start, in their usual order."""

    QUEUE = "queue"
    ALLOCATE = "allocate"
    IMAGE = "image"
    ENV = "env"
    CACHES = "caches"
    BACKOFF = "backoff"
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


# Names of instants that summaries use; docs/reference/events.md lists their writers.
RANK_STARTED = "rank_started"  # by the agent, stage spawn: exec of the rank succeeded
RANK_EXITED = "rank_exited"  # by the agent
SCRIPT = "script"  # by the rank, stage spawn: its script's first statement is next
# A scalar.
EVENTS_DROPPED = "events_dropped"  # by the coordinator, in the run file: a node's lines that are missing there
# Part of each line of a scalar without a stage, as all writers write it: mostly heartbeats.
BEAT_MARK = b'"stage":null,"kind":"scalar"'


class Event(NamedTuple):
    """One line of an event file; missing fields are None or empty."""

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
    attrs: Mapping[str, Any] = {}  # noqa: RUF012
    job_ns: int | None = None  # only in a run file: mono_ns by the coordinator's monotonic clock
    job_error_ns: int | None = None  # bound of its error


# ---- writing -------------------------------------------------------------------------------------------------


class EventWriter:
    """Writer of one process's events to `path` ("" for none). `dropped` counts events that could not be written.

    `attempt` may be changed. The file is opened at the first event and closed by `close`. A file of another
    process (`is_others`) is never created, and no link to it is followed.
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
        """Open a span and return its id."""
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
        """Write an instant. Args: rank: set by an agent for an event of one of its ranks."""
        self.write(stage, Kind.INSTANT, name, rank=rank, error=error, mono_ns=mono_ns, attrs=attrs)

    def scalar(self, stage: Stage | None, name: str, value: float, unit: str | None = None) -> None:
        """Write a measured number."""
        self.write(stage, Kind.SCALAR, name, value=value, unit=unit)

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
        """Append one event. Args: mono_ns: its time, if it is not now."""
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
        except Exception:  # also a value without a text form: events never disturb the caller
            self.dropped += 1

    def close(self) -> None:
        """Close the file; a later event reopens it."""
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
    """Return JSON of plain values; others become their repr. Module json would take 5 ms of each start."""
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
    """Yield the events of a file in order, without lines that are cut off, too long or no events. No file: none.

    Args: without: also skip lines that contain this, at a hundredth of the cost.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError:
        return  # missing or unreadable: its events count as not observed
    with file:
        is_rest = False  # of an overlong line
        while line := file.readline(MAX_LINE_BYTES):
            is_whole = line.endswith(b"\n")
            if not is_rest and is_whole and (without is None or without not in line):
                event = parse_event(line)
                if event is not None:
                    yield event
            is_rest = not is_whole


def parse_event(line: bytes) -> Event | None:
    """Return a line as an event; None for anything else."""
    try:
        found = load_json(line)
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
    """Return the path of the agent's file on `node`."""
    return f"{events_dir}/agent-{safe_name(node)}.jsonl"


def rank_events_path(events_dir: str, node: str, rank: int, attempt: int) -> str:
    """Return the path of a rank's file in one attempt."""
    return f"{events_dir}/rank-{rank}-attempt-{attempt}-{safe_name(node)}.jsonl"


def run_events_path(events_dir: str) -> str:
    """Return the path of the coordinator's file with the events of all nodes."""
    return f"{events_dir}/{RUN_EVENTS_NAME}"


def safe_name(text: str) -> str:
    """Return `text` as part of a file name: bounded, without special characters of paths or shells."""
    kept = "".join(char if char.isascii() and (char.isalnum() or char in "._-") else "_" for char in text)
    return kept[:MAX_NAME_BYTES] or "_"
