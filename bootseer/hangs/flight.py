"""Dumps of torch's flight recorder (NCCL, gloo) as calls of ranks. Pure; the bytes are not trusted.

A dump is a pickle, or JSON, of nothing but containers, texts and numbers (torch/csrc/distributed/c10d/
FlightRecorder.hpp, versions 2.x); a pickle with anything else is rejected. A number in a pickle can request much
memory: read it under a memory limit (launcher/monitor/collectives/flight_child.py). For NCCL it has the ranks of
each group. For gloo it has not, and no messages: a group's ranks are those that have recorded calls in it. Times
are of the wall clock. Buffers wrap: messages count only where the first ones are there.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from bootseer.hangs.calls import Call, Group, RankTrace

MAX_ENTRIES = 20_000
MAX_RANKS = 1 << 16
MAX_TEXT = 64
_NAMES = {
    "_all_gather_base": "all_gather_into_tensor",
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "allreduce": "all_reduce",
    "allgather": "all_gather",
}
_RESULT = ("reduce_scatter", "reduce_scatter_tensor", "scatter")  # their results are alike on all ranks
_FREE = ("all_to_all", "all_to_all_single", "barrier", "coalesced", "ALLTOALL_BASE")
_BYTES = {
    **dict.fromkeys(("Double", "Long", "ComplexFloat"), 8),
    **dict.fromkeys(("Float", "Int"), 4),
    **dict.fromkeys(("Half", "BFloat16", "Short"), 2),
    "ComplexDouble": 16,
}
_PLAIN = {  # other names are those of torch's types in small letters
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "Long": "int64",
    "Int": "int32",
    "Short": "int16",
    "Char": "int8",
    "Byte": "uint8",
}
_MESSAGE = re.compile(r"(send|recv) (\d{1,9})(?:->|<-)(\d{1,9})")


class _Unpickler(pickle.Unpickler):
    """Loads only types that Python has literals for."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def load_dump(data: bytes) -> dict[str, Any] | None:
    """Load a dump of containers, texts and numbers; return None for anything else."""
    try:
        found = json.loads(data) if data[:1] == b"{" else _Unpickler(io.BytesIO(data)).load()
    except (Exception, MemoryError):  # malformed data can raise any of them
        return None
    return found if isinstance(found, dict) and isinstance(found.get("entries"), list) else None


def read_dump(data: bytes, rank: int, shift_ns: int = 0) -> RankTrace | None:
    """Return the calls of a rank; None for an invalid dump. Args: shift_ns: is added to its times."""
    dump = load_dump(data)
    if dump is None:
        return None
    members = _members(dump.get("pg_config"))
    counts: dict[tuple[Group, str, int], int] = {}
    calls: list[Call] = []
    entries = [each for each in dump["entries"][-MAX_ENTRIES:] if isinstance(each, dict)]
    is_whole = len(entries) == len(dump["entries"]) and all(each.get("record_id") != 0 for each in entries[1:])
    is_whole = is_whole and bool(entries) and entries[0].get("record_id") == 0
    for entry in entries:
        try:
            call = _call_of(entry, len(calls) + 1, members, counts, shift_ns)
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError):
            continue  # of another version
        if call is not None and (is_whole or not call.is_message()):
            calls.append(call)
    return RankTrace(rank, tuple(calls))


def _members(found: object) -> dict[str, tuple[int, ...]]:
    """Return the ranks of groups, by name."""
    members: dict[str, tuple[int, ...]] = {}
    for name, each in found.items() if isinstance(found, dict) else ():
        try:
            ranks = json.loads(each["ranks"]) if isinstance(each["ranks"], str) else each["ranks"]
            if ranks and len(ranks) <= MAX_RANKS and all(type(rank) is int for rank in ranks):
                members[str(name)] = tuple(ranks)
        except (ValueError, TypeError, KeyError, RecursionError):
            continue
    return members


def _call_of(
    entry: Mapping[str, Any],
    serial: int,
    members: Mapping[str, tuple[int, ...]],
    counts: dict[tuple[Group, str, int], int],
    shift_ns: int,
) -> Call | None:
    name, label = (str(each)[:MAX_TEXT] for each in entry["process_group"])
    group = Group(name, label, 1, members.get(name, ()))
    said = str(entry["profiling_name"]).partition(":")[2][:MAX_TEXT]
    message = _MESSAGE.fullmatch(said)
    peer = -1
    if message is not None:
        op, place = message[1], int(message[3])
        peer = group.ranks[place] if group.ranks else place
        seq = counts[group, op, peer] = counts.get((group, op, peer), 0) + 1
    elif entry["is_p2p"]:
        return None  # the dump does not name its other end
    else:
        op, seq = _NAMES.get(said, said), int(entry["collective_seq_id"])
    which = "output" if op in _RESULT else "input"
    shapes = [] if op in _FREE else entry[f"{which}_sizes"]
    dtype = str(entry[f"{which}_dtypes"][0])[:MAX_TEXT] if shapes else "other"
    size = sum(prod(map(int, shape)) for shape in shapes) * _BYTES.get(dtype, 1)
    created_ns, ended_ns = int(entry["time_created_ns"]), int(entry["time_discovered_completed_ns"] or 0)
    has_ended = entry["retired"] is True or entry["state"] == "completed"
    return Call(
        *(serial, group, op, seq, peer, 0, size, _PLAIN.get(dtype, dtype.lower())),
        *(tuple(map(int, shapes[0][:4])) if shapes else (), len(shapes), created_ns + shift_ns),
        (ended_ns or created_ns) + shift_ns if has_ended else 0,
        waited_for=entry["state"] == "started",
    )


def fill_members(traces: Iterable[RankTrace]) -> list[RankTrace]:
    """Fill in missing ranks of groups: the ranks that called in them; for the world group all ranks."""
    listed = list(traces)
    everybody = {each.rank for each in listed}
    seen: dict[Group, set[int]] = {}
    for trace in listed:
        for call in trace.calls:
            if not call.group.ranks:
                ranks = everybody if call.group.label == "default_pg" else {trace.rank}
                seen.setdefault(call.group, set()).update(ranks)
    filled = {group: group._replace(ranks=tuple(sorted(ranks))) for group, ranks in seen.items()}
    return [
        trace._replace(
            calls=tuple(call._replace(group=filled.get(call.group, call.group)) for call in trace.calls)
        )
        for trace in listed
    ]
