"""PURE: validation of a line of a node's event file, and its new form for the run file of the job.

In: untrusted bytes, and their sender. Out: a line that bootseer.events.parse_event accepts, of this run and of
that node, with the coordinator's clock; or nothing. Most lines come from Bootseer's own writers, and msgspec
checks them in a microsecond; parse_event decides about lines that msgspec rejects.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from bootseer.events import VERSION, Event, Kind, parse_event, to_json
from launcher.rendezvous.clock import UNKNOWN_NS, map_back
from launcher.rendezvous.event_batch import MAX_LINE_BYTES

_MAX = 2**62  # of a number: a sum of two of them still fits in 64 bits
_Count = Annotated[int, msgspec.Meta(ge=-_MAX, le=_MAX)]


class _Line(msgspec.Struct, omit_defaults=True):
    v: Literal[1]
    wall_ns: _Count
    mono_ns: _Count
    run_id: str
    node: str
    rank: _Count | None
    attempt: _Count | None
    stage: str | None
    kind: str
    name: str
    span: str | None = None
    parent: str | None = None
    value: int | float | str | None = None
    unit: str | None = None
    error: str | None = None
    attrs: dict[str, Any] = {}
    job_ns: int | None = None
    job_error_ns: int | None = None


class LineSender(NamedTuple):
    """The sender of lines, and the mapping of its clock."""

    run_id: str
    node: str
    local_ns: int
    job_ns: int
    error_ns: int


class ValidLine(NamedTuple):
    """A line for the run file, with its end."""

    line: bytes
    is_beat: bool  # a heartbeat: a scalar that belongs to no stage


_decoder = msgspec.json.Decoder(_Line)
_encoder = msgspec.json.Encoder()
_ERRORS = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


def validate_line(line: bytes, source: LineSender) -> ValidLine | None:
    """Return the line to write; None if it is no event of this run."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        found = _decoder.decode(line)
    except _ERRORS:
        return _vet_slowly(line, source)
    if found.run_id != source.run_id:
        return None
    found.node = source.node
    found.job_ns, found.job_error_ns = job_clock(found.mono_ns, source)
    try:
        return ValidLine(_encoder.encode(found) + b"\n", _is_beat(found.stage, found.kind))
    except _ERRORS:
        return _vet_slowly(line, source)  # numbers that do not fit in 64 bits


def _vet_slowly(line: bytes, source: LineSender) -> ValidLine | None:
    event = parse_event(line)
    if event is None or event.run_id != source.run_id or not _is_sane(event):
        return None
    job_ns, job_error_ns = job_clock(event.mono_ns, source)
    try:
        written = write_event(event._replace(node=source.node, job_ns=job_ns, job_error_ns=job_error_ns))
    except _ERRORS:
        return None
    # Escapes may be longer than their characters, and every written line must be readable.
    return ValidLine(written, _is_beat(event.stage, event.kind)) if len(written) <= 8 * MAX_LINE_BYTES else None


def write_event(event: Event) -> bytes:
    """Format an event as a line of a file."""
    fields = {"v": VERSION, **event._asdict()}
    for name in Event._field_defaults:
        if fields[name] is None or (name == "attrs" and not event.attrs):
            del fields[name]
    return to_json(fields).encode("utf-8", "backslashreplace") + b"\n"


def job_clock(mono_ns: int, source: LineSender) -> tuple[int | None, int | None]:
    """Map a time to the coordinator's clock, with the bound of its error; None if no clocks were compared."""
    if source.error_ns >= UNKNOWN_NS:
        return None, None
    return map_back(mono_ns, source.local_ns, source.job_ns, source.error_ns)


def _is_beat(stage: str | None, kind: str) -> bool:
    return stage is None and kind == Kind.SCALAR.value


def _is_sane(event: Event) -> bool:
    numbers = (event.wall_ns, event.mono_ns, event.rank or 0, event.attempt or 0)
    return all(abs(number) <= _MAX for number in numbers)
