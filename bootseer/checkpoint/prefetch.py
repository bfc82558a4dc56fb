"""What a node reads before its ranks ask for it. Pure.

In: the files of a version, what an earlier load of the same layout on the same node position read (a `Recording`),
and how much memory there is. Out: ranges in the order in which to read them. A sharded checkpoint must not be read
whole by every node, so a first load fetches only metadata and what ranks ask for; it wastes nothing. Recordings
lie on disk (recordings.py) and are not trusted.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from bootseer.checkpoint.source import SourceFile
from bootseer.storage.extents import Extents, cut

FORMAT = "bootseer-load/1"
PIECE_BYTES = 16 << 20  # what is read at a time; a multiple of any page size
MAX_RECORDED_RANGES = 20_000  # more are joined over small gaps
MAX_METADATA_BYTES = 64 << 20
METADATA = (".metadata", "model.safetensors.index.json")  # every rank reads them whole, first
WHOLE = "whole"
RECORDED = "recorded"
METADATA_ONLY = "metadata"
NOTHING = "nothing"


class Position(NamedTuple):
    """Which node of which job: nodes at the same one read the same ranges."""

    world_size: int
    nnodes: int
    group_rank: int


class Range(NamedTuple):
    """Bytes of one file."""

    path: str
    start: int
    end: int


class Plan(NamedTuple):
    """What to prefetch, in order, and why."""

    kind: str  # WHOLE | RECORDED | METADATA_ONLY | NOTHING
    ranges: list[Range]
    reason: str

    @property
    def bytes(self) -> int:
        return sum(piece.end - piece.start for piece in self.ranges)


class RecordedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What ranks asked for of one file."""

    path: str
    size: int  # bytes
    ranges: list[tuple[int, int]]  # start, end; sorted, apart


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the ranks of one node read of a checkpoint: docs of the file `loads/<key>.json`."""

    format: str
    world_size: int
    nnodes: int
    group_rank: int
    files: list[RecordedFile]


def plan(
    files: Mapping[str, SourceFile],
    recording: Recording | None,
    room_bytes: int,
    position: Position,
    whole: bool,
    spare: Collection[str] = (),
) -> Plan:
    """`whole`: the ranks' code reads files by name, so nothing less than all helps, but for `spare` files."""
    if whole and spare:
        files = {path: file for path, file in files.items() if path not in spare}
    total = sum(file.size for file in files.values())
    everything = {path: Extents([(0, file.size)]) for path, file in files.items()}
    if whole:
        if total > room_bytes:
            return Plan(NOTHING, [], "the whole version is asked for and does not fit")
        return Plan(WHOLE, _spread(_pieces(everything), position), "all of it is asked for")
    if recording is not None:
        recorded = _spans(recording, files)
        read = sum(spans.total_bytes for spans in recorded.values())
        share = f"{100 * read / total if total else 0:.0f} %"
        if 2 * read > total and total <= room_bytes:
            first = _spread(_pieces(recorded), position)
            rest = {path: everything[path].minus(recorded.get(path, Extents())) for path in files}
            return Plan(WHOLE, first + _spread(_pieces(rest), position), f"an earlier load read {share} of it")
        if read:
            ranges = _first(_pieces(recorded), room_bytes)
            return Plan(RECORDED, ranges, f"an earlier load read {share} of it")
    metadata = {path: everything[path] for path in files if _is_metadata(files[path])}
    ranges = _first(_pieces(metadata), room_bytes)
    return Plan(METADATA_ONLY if ranges else NOTHING, ranges, "no earlier load like this one is known")


def key(files: Mapping[str, SourceFile], position: Position) -> str:
    """Names the loads that read alike. Sizes count roughly: a step count more or less changes a few bytes."""
    digest = hashlib.sha256(repr(tuple(position)).encode())
    for path in sorted(files):
        size = files[path].size
        low_bits = max(12, size.bit_length() - 7)
        digest.update(f"\0{path}\0{size >> low_bits << low_bits}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:40]


def record(files: Mapping[str, SourceFile], asked: Mapping[str, Extents], position: Position) -> Recording | None:
    """What ranks asked for as a recording; None where they asked for nothing."""
    shares = {path: spans for path, spans in asked.items() if len(spans)}
    if not shares:
        return None
    limit = max(1, MAX_RECORDED_RANGES // len(shares))
    found = [
        RecordedFile(path, files[path].size, join(list(spans), limit))
        for path, spans in sorted(shares.items())[:MAX_RECORDED_RANGES]
    ]
    return Recording(format=FORMAT, **position._asdict(), files=found)


def merge(older: Recording | None, newer: Recording, complete: bool) -> Recording:
    """What to keep. A complete load says all that is read: what it did not ask for is not kept for ever.

    One that ended early must not forget what others read: then it is both.
    """
    if older is None or complete:
        return newer
    spans = {file.path: (file.size, Extents(file.ranges)) for file in older.files}
    for file in newer.files:
        _, known = spans.get(file.path, (file.size, Extents()))
        spans[file.path] = (file.size, Extents(span for span in [*known, *file.ranges] if span[1] <= file.size))
    files = [RecordedFile(path, size, list(known)) for path, (size, known) in sorted(spans.items()) if len(known)]
    return msgspec.structs.replace(newer, files=files)


def join(spans: Sequence[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """At most `limit` ranges that cover all: those with the smallest gaps between them become one."""
    if len(spans) <= limit:
        return list(spans)
    gaps = sorted(range(1, len(spans)), key=lambda at: spans[at - 1][1] - spans[at][0])  # widest first
    starts = sorted([0, *gaps[: limit - 1]])
    return [(spans[a][0], spans[b - 1][1]) for a, b in zip(starts, [*starts[1:], len(spans)], strict=True)]


def decode(data: bytes, files: Mapping[str, SourceFile], position: Position) -> Recording | None:
    """A recording as read from disk; None for anything but a right one for these files and this position."""
    try:
        found = msgspec.json.decode(data, type=Recording)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    if found.format != FORMAT or (found.world_size, found.nnodes, found.group_rank) != tuple(position):
        return None
    if sum(len(file.ranges) for file in found.files) > 2 * MAX_RECORDED_RANGES:
        return None
    for file in found.files:
        end_before = -1
        for start, end in file.ranges:
            if not end_before < start < end <= file.size:
                return None
            end_before = end
    return found if all(file.path in files for file in found.files) else None


def _spans(recording: Recording, files: Mapping[str, SourceFile]) -> dict[str, Extents]:
    """The recording's ranges as far as these files have them."""
    return {
        file.path: Extents((start, min(end, files[file.path].size)) for start, end in file.ranges)
        for file in recording.files
        if file.path in files
    }


def _is_metadata(file: SourceFile) -> bool:
    return file.path.rpartition("/")[2] in METADATA and file.size <= MAX_METADATA_BYTES


def _pieces(wanted: Mapping[str, Extents]) -> list[Range]:
    """Metadata first, then by name and place."""
    order = sorted(wanted, key=lambda path: (path.rpartition("/")[2] not in METADATA, path))
    return [
        Range(path, *piece)
        for path in order
        for start, end in wanted[path]
        for piece in cut(start, end, PIECE_BYTES)
    ]


def _first(ranges: list[Range], room_bytes: int) -> list[Range]:
    """As many as fit."""
    taken = []
    for piece in ranges:
        room_bytes -= piece.end - piece.start
        if room_bytes < 0:
            break
        taken.append(piece)
    return taken


def _spread(ranges: list[Range], position: Position) -> list[Range]:
    """Several nodes that read the same must not go from server to server in step: each has its own order."""
    if position.nnodes < 2:
        return ranges
    ranges = list(ranges)
    random.Random(repr(tuple(position))).shuffle(ranges)  # noqa: S311 - an order, no secret
    return ranges
