"""The plan of reads that a node makes before its ranks request them. Pure.

In: the files of a version, the access trace of an earlier load of the same layout at the same node position (a
`Recording`), and the available memory. Out: ranges in the order in which to read them. Not every node must read
all of a sharded checkpoint. So a first load fetches only metadata and ranges that ranks request; it wastes
nothing. Traces are on disk (traces.py) and are not trusted.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from bootseer.checkpoint.io.source import SourceFile
from bootseer.storage.engine.extents import Extents, cut

FORMAT = "bootseer-load/1"
PIECE_BYTES = 16 << 20  # of one read; a multiple of any page size
MAX_RECORDED_RANGES = 20_000  # more are joined over small gaps
MAX_METADATA_BYTES = 64 << 20
METADATA = (".metadata", "model.safetensors.index.json")  # every rank reads them whole, first
WHOLE = "whole"
RECORDED = "recorded"
METADATA_ONLY = "metadata"
NOTHING = "nothing"


class Position(NamedTuple):
    """The position of a node in a job: nodes at the same position read the same ranges."""

    world_size: int
    nnodes: int
    group_rank: int


class Range(NamedTuple):
    """Bytes of one file."""

    path: str
    start: int
    end: int


class Plan(NamedTuple):
    """The ranges to prefetch, in order, and the reason."""

    kind: str  # WHOLE | RECORDED | METADATA_ONLY | NOTHING
    ranges: list[Range]
    reason: str

    @property
    def bytes(self) -> int:
        return sum(piece.end - piece.start for piece in self.ranges)


class RecordedFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranges of one file that ranks requested."""

    path: str
    size: int  # bytes
    ranges: list[tuple[int, int]]  # start, end; sorted, apart


class Recording(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The reads of the ranks of one node in a checkpoint: the format of the file `loads/<key>.json`."""

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
    """Plan reads. `whole`: the ranks' code reads files by name, so it needs all files except `spare` ones."""
    if whole and spare:
        files = {path: file for path, file in files.items() if path not in spare}
    total = sum(file.size for file in files.values())
    everything = {path: Extents([(0, file.size)]) for path, file in files.items()}
    if whole:
        if total > room_bytes:
            return Plan(NOTHING, [], "the whole version is requested and does not fit")
        return Plan(WHOLE, _spread(_pieces(everything), position), "all of it is requested")
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
    """Return the key of loads with the same reads. Sizes count roughly: a step count changes a few bytes."""
    digest = hashlib.sha256(repr(tuple(position)).encode())
    for path in sorted(files):
        size = files[path].size
        low_bits = max(12, size.bit_length() - 7)
        digest.update(f"\0{path}\0{size >> low_bits << low_bits}".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:40]


def record(files: Mapping[str, SourceFile], asked: Mapping[str, Extents], position: Position) -> Recording | None:
    """Return the ranks' requests as a trace; None if there were none."""
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
    """Merge traces. A complete load has read all that is needed: older ranges that it did not request are dropped.

    A load that ended early must not drop the ranges of others: then the result has both.
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
    """Return at most `limit` ranges that cover all: those with the smallest gaps between them are joined."""
    if len(spans) <= limit:
        return list(spans)
    gaps = sorted(range(1, len(spans)), key=lambda at: spans[at - 1][1] - spans[at][0])  # widest first
    starts = sorted([0, *gaps[: limit - 1]])
    return [(spans[a][0], spans[b - 1][1]) for a, b in zip(starts, [*starts[1:], len(spans)], strict=True)]


def decode(data: bytes, files: Mapping[str, SourceFile], position: Position) -> Recording | None:
    """Decode a trace from disk; return None unless it is valid for these files and this position."""
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
    """Return the trace's ranges, clipped to these files."""
    return {
        file.path: Extents((start, min(end, files[file.path].size)) for start, end in file.ranges)
        for file in recording.files
        if file.path in files
    }


def _is_metadata(file: SourceFile) -> bool:
    return file.path.rpartition("/")[2] in METADATA and file.size <= MAX_METADATA_BYTES


def _pieces(wanted: Mapping[str, Extents]) -> list[Range]:
    """Return pieces: metadata first, then by name and offset."""
    order = sorted(wanted, key=lambda path: (path.rpartition("/")[2] not in METADATA, path))
    return [
        Range(path, *piece)
        for path in order
        for start, end in wanted[path]
        for piece in cut(start, end, PIECE_BYTES)
    ]


def _first(ranges: list[Range], room_bytes: int) -> list[Range]:
    taken = []
    for piece in ranges:
        room_bytes -= piece.end - piece.start
        if room_bytes < 0:
            break
        taken.append(piece)
    return taken


def _spread(ranges: list[Range], position: Position) -> list[Range]:
    """Shuffle the order per node, so that nodes with the same reads do not load the same server in step."""
    if position.nnodes < 2:
        return ranges
    ranges = list(ranges)
    random.Random(repr(tuple(position))).shuffle(ranges)  # noqa: S311 - an order, no secret
    return ranges
