"""PURE: messages as bytes and back: type tags, sizes that each type may have, bounds of every field.

Input is checked completely before any code sees it. Output is cut to the same bounds, so that a long traceback or
a strange host name loses its tail, but never costs the connection.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import msgspec

from launcher.rendezvous import messages as m
from launcher.rendezvous.messages import FromCoordinator, FromMember

Message = FromMember | FromCoordinator

KIB = 1024
MAX_PAYLOAD_BYTES = 1024 * KIB
MAX_EVENTS_BYTES = 64 * KIB  # of a batch of events, compressed
MAX_TRACES_BYTES = 64 * KIB  # of the calls of a node's ranks, compressed
MAX_LAYOUT_BYTES = 16 * KIB  # of a line of bootseer/hangs/layout.py
MAX_DEVICES_BYTES = 16 * KIB  # of monitor/collectives/accelerators.py
MAX_RAW_EVENTS_BYTES = 1024 * KIB  # before compression
MAX_EVENT_LINES = 8192


class CodecError(Exception):
    """Bytes that are not a valid message; the text gives the reason."""


class Kind(NamedTuple):
    """A type of message on the wire."""

    tag: int
    type: type[Message]
    max_bytes: int  # of its payload
    decoder: msgspec.msgpack.Decoder[Any]


def _kinds(*rows: tuple[int, type[Message], int]) -> dict[int, Kind]:
    return {tag: Kind(tag, of, most, msgspec.msgpack.Decoder(of)) for tag, of, most in rows}


# Tags are never reused; a changed message gets a new protocol number (wire.py).
FROM_MEMBER = _kinds(
    (1, m.Join, 6 * KIB),
    (2, m.Identity, 6 * KIB),
    (3, m.Environment, MAX_PAYLOAD_BYTES),
    (4, m.Ping, 32),
    (5, m.Started, 32),
    (6, m.RankFailed, 512 * KIB),
    (7, m.Succeeded, 16),
    (8, m.Stopped, MAX_PAYLOAD_BYTES),
    (9, m.Signalled, 16),
    (10, m.Leave, 64 * KIB),
    (11, m.SetupReport, 64 * KIB),
    (12, m.EventBatch, MAX_EVENTS_BYTES + 128),
    (13, m.PeerServes, 2 * KIB),
    (17, m.CheckpointFailed, 64 * KIB),
    (14, m.Listens, 16),
    (15, m.RankSamples, MAX_PAYLOAD_BYTES),
    (16, m.NodeStacks, MAX_EVENTS_BYTES + MAX_TRACES_BYTES + MAX_LAYOUT_BYTES + MAX_DEVICES_BYTES + 128),
    (24, m.RuleFired, 16 * KIB),
    (25, m.RuleObservation, 2 * KIB),
    (40, m.PairPort, 2 * KIB),
    (41, m.PairResult, 16 * KIB),
    (42, m.ClockReading, 32),
    (48, m.Examined, 16 * KIB),
    (49, m.RecoveryResult, 256 * KIB),
    (56, m.Resume, 128),
)
FROM_COORDINATOR = _kinds(
    (65, m.Welcome, 128),
    (66, m.Pong, 64),
    (67, m.WantEnvironment, 16),
    (68, m.World, 2 * KIB),
    (69, m.Spare, 16),
    (70, m.Stop, 64 * KIB),
    (71, m.Note, 64 * KIB),
    (72, m.Finish, MAX_PAYLOAD_BYTES),
    (73, m.Refused, 64 * KIB),
    (74, m.SetupOrder, 64 * KIB),
    (75, m.WantEvents, 16),
    (76, m.PeerNodes, 64 * KIB),
    (77, m.MasterListens, 16),
    (78, m.WantStacks, 32),
    (79, m.HangReport, 256 * KIB),
    (88, m.RuleReport, 16 * KIB),
    (80, m.FailureRecordMessage, MAX_EVENTS_BYTES + 128),
    (104, m.WantPairs, 16),
    (105, m.PairOrder, 64 * KIB),
    (106, m.CheckReport, 16 * KIB),
    (112, m.Examine, 32),
    (113, m.RecoveryStep, MAX_PAYLOAD_BYTES),
    (114, m.StepTaken, 16 * KIB),
    (120, m.Resumed, 16),
    (121, m.DroppedFromJob, 64 * KIB),
    (122, m.LivenessProbe, 16),
)
_KIND_OF: dict[type[Any], Kind] = {
    kind.type: kind for kinds in (FROM_MEMBER, FROM_COORDINATOR) for kind in kinds.values()
}

# Characters of a text field, by its name.
MAX_NAME_CHARS = 256
MAX_TEXT_CHARS = 16 * KIB
_TEXT_CHARS = {
    **dict.fromkeys(("run_id", "host", "address", "role", "node", "interpreter", "master_addr"), MAX_NAME_CHARS),
    **dict.fromkeys(("digest", "key", "tree", "token", "place", "content", "args"), 64),
    **dict.fromkeys(("what", "do"), 16),
    **dict.fromkeys(("id", "own"), MAX_NAME_CHARS + 16),
    "why": KIB,
    "error_file": 4 * KIB,
    "oom": 8,
    "step": 32,
    "layout": MAX_LAYOUT_BYTES,
    **dict.fromkeys(("message", "traceback", "reason", "text"), MAX_TEXT_CHARS),
    # Of one item:
    "names": 300,
    "stderr_tail": 2 * KIB,
    **dict.fromkeys(("hosts", "suspects"), MAX_NAME_CHARS),
}
_ITEMS = {
    "names": 20_000,
    "stderr_tail": 64,
    "kernel": 16,
    "checks": 16,
    "mounts": 16,
    "measured": 64,
    "failures": 4096,
    "unsure": 4096,
    "nodes": 256,
    "hosts": 16_384,
    "suspects": 1024,
    "found": 256,
}
_BYTES = {"data": MAX_EVENTS_BYTES, "traces": MAX_TRACES_BYTES}
_HUGE = 2**62
_NUMBERS: dict[str, tuple[float, float]] = {
    "pid": (0, 2**31),
    "node_rank": (-1, 2**20),
    "local_world_size": (1, 2**16),
    "min_nodes": (1, 2**20),
    "max_nodes": (1, 2**20),
    "master_port": (0, 65535),
    "port": (0, 65535),
    "signum": (1, 64),
    "status": (-64, 2**32),
    "grace_s": (0, 2**31),
    "spawn_s": (0, 2**31),
    "limit_s": (0, 2**31),
    "seconds": (0, 2**31),
    "wall_s": (-_HUGE, _HUGE),
    "error_ns": (0, _HUGE),
    "wall_ns": (-_HUGE, _HUGE),
    **dict.fromkeys(("measured", "limit"), (-_HUGE, _HUGE)),
    "raw_bytes": (0, MAX_RAW_EVENTS_BYTES),
    "lines": (0, MAX_EVENT_LINES),
    "step": (-_HUGE, _HUGE),
}
_ANY_NUMBER = (-1, _HUGE)
_UNCHECKED = (m.Ping, m.Pong)  # many, and made of clock readings only

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message) -> tuple[int, bytes]:
    """Return the tag and the payload of a message, cut to the bounds of the receiver."""
    kind = _KIND_OF[type(message)]
    if kind.type in _UNCHECKED:
        return kind.tag, _encoder.encode(message)
    chars, items = MAX_TEXT_CHARS, 20_000
    while True:
        payload = _encoder.encode(_cut(message, chars, items))
        if len(payload) <= kind.max_bytes:
            return kind.tag, payload
        chars, items = (chars // 2, items) if chars > 128 else (chars, items // 2)


def _cut(message: tuple[Any, ...], chars: int, items: int) -> Any:
    fields: tuple[str, ...] = message._fields  # type: ignore[attr-defined]
    values = [_cut_value(name, value, chars, items) for name, value in zip(fields, message, strict=True)]
    return type(message)(*values)


def _cut_value(name: str, value: Any, chars: int, items: int) -> Any:
    if isinstance(value, str):
        return _cut_text(value, min(_TEXT_CHARS.get(name, KIB), chars))
    if isinstance(value, bytes):
        return value[: _BYTES[name]]
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return _cut(value, chars, items)
        return tuple(_cut_value(name, item, chars, items) for item in value[: min(_ITEMS.get(name, KIB), items)])
    return value


def _cut_text(text: str, chars: int) -> str:
    if not text.isascii():
        # Lone surrogates stand for bytes that are not UTF-8, as in file names and outputs.
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text if len(text) <= chars else text[: chars - 3] + "..."


def decode(kind: Kind, payload: bytes | bytearray) -> Message:
    """Return the checked message. Raises: CodecError."""
    try:
        message = kind.decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"an invalid {kind.type.__name__} message: {error}") from None
    if kind.type not in _UNCHECKED:
        wrong = _find_wrong(message)
        if wrong is not None:
            raise CodecError(f"an invalid {kind.type.__name__} message: {wrong} is out of bounds")
    return cast(Message, message)


def _find_wrong(message: tuple[Any, ...]) -> str | None:
    fields: tuple[str, ...] = message._fields  # type: ignore[attr-defined]
    for name, value in zip(fields, message, strict=True):
        if not _is_within(name, value):
            return name
    return None


def _is_within(name: str, value: Any) -> bool:
    if value is None:
        return True  # where the type allows it
    if isinstance(value, str):
        return len(value) <= _TEXT_CHARS.get(name, KIB)
    if isinstance(value, bytes):
        return len(value) <= _BYTES[name]
    if isinstance(value, int | float):
        low, high = _NUMBERS.get(name, _ANY_NUMBER)
        return low <= value <= high
    if hasattr(value, "_fields"):
        return _find_wrong(value) is None
    return len(value) <= _ITEMS.get(name, KIB) and all(_is_within(name, item) for item in value)
