"""The ring of a rank's calls of torch.distributed, behind its stats page: launcher/in_rank/tracer.py writes it.

Little endian, from the end of the page (512) on; the slot of a call is its serial number modulo SLOTS:
    0  8  magic BOOTRING; 8  4  version; 16  8  bytes of the whole ring     head of 64 bytes
   24  4  number of traced operators; 0: none, nothing is known
   64     groups, a line each: number, generation, name, label, ranks as START:COUNT:STEP,...; tabs between
16448     records of 76 bytes: serial, number in the group, bytes, entered ns (8 each), group (2), operator, type
          (1 each), tensors (2), peer, tag (4), dimensions (1), the first four (4 each), left ns (8), flags (1),
          and the serial number's lower half again: a record is written from beginning to end, so if it is read
          while it is written, the two differ, and it is read again
Flags: 1 it is waited for, 2 it failed, 4 its end is not observable, 8 later calls of a GPU are queued behind it,
16 it is on a GPU. There is one writer and no lock: it can be read while the rank hangs, and after its death.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from bootseer.hangs.calls import Call, Group, RankTrace
from bootseer.hangs.layout import format_runs, parse_runs
from launcher.in_rank.tracer import (
    FAILED,
    GROUPS_AT,
    GROUPS_BYTES,
    HOOKED_AT,
    IN_ORDER,
    LOST_SIGHT,
    LOW_SERIAL,
    ON_DEVICE,
    OPERATORS,
    RECORD_BYTES,
    RECORD_FORMAT,
    RECORDS_AT,
    RING_AT,
    RING_END,
    RING_HEAD,
    SLOTS,
    TYPES,
    WAITED_FOR,
)
from launcher.ranks.stats_page import PAGE_BYTES

RING_BYTES = RING_END - PAGE_BYTES
NEW_RING = (RING_HEAD + bytes(4) + RING_BYTES.to_bytes(8, "little")).ljust(RING_BYTES, b"\0")
MAX_RANKS = 1 << 20  # of all groups of a rank, or of a node
MAX_TRACE_BYTES = 4 << 20  # of a node, unpacked
MAX_TAIL = 64  # calls of a rank that are sent
MAX_TEXT = 64
TRIES = 3
_RECORD = struct.Struct(RECORD_FORMAT)
# The usual names; the others are torch's operators without underscores.
_NAMES = {
    **{name: name.strip("_") for name in OPERATORS},
    "allreduce_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
}


class RankRing(NamedTuple):
    """The content of a rank's ring; times of the node's monotonic clock."""

    rank: int
    calls: tuple[Call, ...]
    ended: bool


def read_ring(path: str, rank: int, ended: bool = False) -> RankRing | None:
    """Read a ring; None if nothing is traced. Args: path: of the rank's stats page."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        best: list[Call] | None = None
        for _ in range(TRIES):
            found, torn = parse_ring(os.pread(fd, RING_END, 0))
            if found is None:
                return None
            best = found
            if not torn:
                break
        return RankRing(rank, tuple(best or ()), ended)
    except OSError:
        return None
    finally:
        os.close(fd)


def copy_ring(path: str) -> bytes:
    """Copy the raw ring for later; b"" if unreadable. Args: path: of the rank's stats page."""
    try:
        with open(path, "rb", 0) as file:
            return os.pread(file.fileno(), RING_END, 0)
    except OSError:
        return b""


def traces_of(copies: Mapping[int, bytes]) -> list[RankTrace]:
    """Return the calls of ended ranks, from copies of their rings."""
    found = {rank: parse_ring(data)[0] for rank, data in copies.items()}
    return [RankTrace(rank, tuple(calls), ended=True) for rank, calls in found.items() if calls]


def parse_ring(data: bytes) -> tuple[list[Call] | None, int]:
    """Return calls in their order, and the number of torn records; None if nothing is traced."""
    is_ours = len(data) >= RING_END and data[RING_AT : RING_AT + len(RING_HEAD)] == RING_HEAD
    if not is_ours or not int.from_bytes(data[HOOKED_AT : HOOKED_AT + 4], "little"):
        return None, 0
    groups = _parse_groups(data[GROUPS_AT : GROUPS_AT + GROUPS_BYTES])
    calls, torn = [], 0
    for slot in range(SLOTS):
        at = RECORDS_AT + slot * RECORD_BYTES
        record = data[at : at + RECORD_BYTES]
        if not record.strip(b"\0"):
            continue
        fields = _RECORD.unpack(record)
        if fields[-1] != fields[0] & LOW_SERIAL or fields[0] % SLOTS != slot or not fields[0]:
            torn += 1
            continue
        group = groups.get(fields[4])
        if group is not None and fields[5] < len(OPERATORS):
            calls.append(_call_of(fields, group))
    return sorted(calls), torn


def _call_of(fields: tuple[Any, ...], group: Group) -> Call:
    serial, seq, size, entered_ns, _, op, kind, tensors, peer, tag, dims, *shape, left_ns, flags, _ = fields
    return Call(
        *(serial, group, _NAMES[OPERATORS[op]], seq, peer, tag, size),
        TYPES[kind] if kind < len(TYPES) else TYPES[0],
        *(tuple(shape[: min(dims, 4)]), tensors, entered_ns, left_ns),
        *(bool(flags & WAITED_FOR), bool(flags & FAILED), bool(flags & LOST_SIGHT)),
        *(bool(flags & IN_ORDER), bool(flags & ON_DEVICE)),
    )


def _parse_groups(data: bytes) -> dict[int, Group]:
    found: dict[int, Group] = {}
    known = 0
    for line in data.split(b"\n")[:-1]:
        try:
            number, generation, name, label, runs = line.decode("ascii").split("\t")
            ranks = parse_runs(runs, MAX_RANKS - known)
            found[int(number)] = Group(name, label, int(generation), ranks)
            known += len(ranks)
        except ValueError:
            pass  # torn, or not written by the tracer
    return found


# ---- transfer to the coordinator -----------------------------------------------------------------------------


def select_newest(calls: Iterable[Call], most: int) -> list[Call]:
    """Return the newest calls, all unfinished ones, and the newest of each group and direction."""
    ordered = sorted(calls)
    newest: dict[object, Call] = {}
    for call in ordered:
        way = (call.op, call.peer, call.tag) if call.is_message() else ()
        newest[call.group, way] = call
    kept = {call.serial: call for call in (*ordered[max(0, len(ordered) - most) :], *newest.values())}
    kept.update((call.serial, call) for call in [each for each in ordered if each.is_open()][:MAX_TAIL])
    return [kept[serial] for serial in sorted(kept)]


def pack_rings(rings: Iterable[RankRing], shift_ns: int, max_bytes: int) -> bytes:
    """Serialize as zlib of JSON; drop calls until it fits; b"" for none. Args: shift_ns: to the job's clock."""
    found = list(rings)
    most = MAX_TAIL
    while found:
        groups: dict[Group, int] = {}
        ranks = [
            [
                each.rank,
                int(each.ended),
                [_pack_call(call, groups, shift_ns) for call in select_newest(each.calls, most)],
            ]
            for each in found
        ]
        listed = [[group.name, group.label, group.generation, format_runs(group.ranks)] for group in groups]
        data = zlib.compress(json.dumps([listed, ranks], separators=(",", ":")).encode())
        if len(data) <= max_bytes:
            return data
        if not most:
            break
        most //= 2
    return b""


def _pack_call(call: Call, groups: dict[Group, int], shift_ns: int) -> list[Any]:
    number = groups.setdefault(call.group, len(groups))
    times = [each + shift_ns if each else 0 for each in (call.entered_ns, call.left_ns)]
    return [call.serial, number, *call[2:10], *times, *map(int, call[12:])]


def unpack_rings(data: bytes, stopped: Mapping[int, bool]) -> dict[int, RankTrace]:
    """Parse the same; return none for invalid data. Args: stopped: whether ranks are known to be stopped."""
    if not data:
        return {}
    try:
        listed, ranks = json.loads(zlib.decompressobj().decompress(data, MAX_TRACE_BYTES))
        groups: list[Group] = []
        known = 0
        for name, label, generation, runs in listed:
            members = parse_runs(str(runs), MAX_RANKS - known)
            known += len(members)
            groups.append(Group(str(name)[:MAX_TEXT], str(label)[:MAX_TEXT], int(generation), members))
        return {
            int(rank): RankTrace(
                int(rank),
                tuple(_unpack_call(each, groups) for each in calls),
                bool(ended),
                stopped.get(rank, False),
            )
            for rank, ended, calls in ranks
        }
    except (
        zlib.error,
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        RecursionError,
        OverflowError,
    ):
        return {}


def _unpack_call(record: list[Any], groups: list[Group]) -> Call:
    serial, group, op, seq, peer, tag, size, dtype, shape, tensors, entered_ns, left_ns, *flags = record
    what = int(serial), groups[group], str(op)[:MAX_TEXT], int(seq), int(peer), int(tag), int(size)
    dims = tuple(int(each) for each in shape[:4])
    return Call(
        *what,
        *(str(dtype)[:MAX_TEXT], dims, int(tensors), int(entered_ns), int(left_ns)),
        *map(bool, flags[:5]),
    )
