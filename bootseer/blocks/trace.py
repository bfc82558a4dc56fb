"""Hot traces: which blocks starts touched, in what order and when; docs/formats.md, "Hot traces". Pure.

In: recordings of nodes and runs, and what others stored, which is not trusted. Out: one trace that knows how often
each block was seen, so that what a start needs comes first and what was chance does not come at all.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence

import msgspec

from bootseer.errors import FormatVersion, IntegrityError

FORMAT = "bootseer-trace/1"
ANY_WORKLOAD = "0" * 16
MOST_PAYLOAD_BYTES = 12 << 20  # base64 in an envelope of 16 MiB
MOST_RUNS = 1 << 31
MOST_TRACED = 1 << 18  # blocks: 32 GiB of hot data
MOST_MS = 1 << 31
KEPT_RUNS = 32  # what was not seen for a few times so many runs is forgotten
_WORKLOAD = re.compile(r"[0-9a-f]{16}")


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What starts touched. Shapes: T blocks traced, in the order in which they are to be fetched."""

    format: str = FORMAT
    tree: str
    workload: str
    runs: int  # recordings in it
    blocks: list[int]  # T
    seen: list[int]  # T: in how many of the recordings
    first_ms: list[int]  # T: from the mount to the first touch, mean of the recordings that saw it

    def hot(self) -> list[int]:
        """Blocks to fetch ahead, in order: those that at least half of the recordings saw."""
        return [number for number, seen in zip(self.blocks, self.seen, strict=True) if 2 * seen >= self.runs]


class _Head(msgspec.Struct):
    format: str


def workload_key(program: str, script: str) -> str:
    """What was started: its program and its script or module, wherever they lie and whatever their arguments."""
    names = [name.rstrip("/").rpartition("/")[2] for name in (program, script)]
    return hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def encode(trace: Trace) -> bytes:
    """The JSON that is signed and stored. Raises: IntegrityError for what no reader would take."""
    wrong = _find_wrong(trace, trace.tree, None)
    if wrong:
        raise IntegrityError(f"this trace {wrong}")
    return msgspec.json.encode(trace)


def decode(data: bytes, tree: str, block_count: int, where: str) -> Trace:
    """The trace of `tree`, which has so many blocks.

    Raises: IntegrityError for anything that is none, or not of this tree; FormatVersion.
    """
    if len(data) > MOST_PAYLOAD_BYTES:
        raise IntegrityError(f"{where}: {len(data)} bytes; no trace is larger than {MOST_PAYLOAD_BYTES}")
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise FormatVersion(f"{where}: has format {head.format[:80]!r}; this Bootseer reads {FORMAT}")
        trace = msgspec.json.decode(data, type=Trace)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is no hot trace: {error}") from error
    wrong = _find_wrong(trace, tree, block_count)
    if wrong:
        raise IntegrityError(f"{where}: {wrong}")
    return trace


def merge(traces: Sequence[Trace]) -> Trace:
    """One trace of all recordings, of one tree and one workload. The order of `traces` does not matter.

    Blocks that at least half of the recordings saw come first; both parts are in the order of their mean first
    touch.
    """
    if not traces or len({(trace.tree, trace.workload) for trace in traces}) != 1:
        raise ValueError("traces are merged of one tree and one workload")
    seen: dict[int, int] = {}
    total_ms: dict[int, int] = {}
    for trace in traces:
        for number, times, first_ms in zip(trace.blocks, trace.seen, trace.first_ms, strict=True):
            seen[number] = seen.get(number, 0) + times
            total_ms[number] = total_ms.get(number, 0) + first_ms * times
    means = {number: total_ms[number] / times for number, times in seen.items()}
    return _make(traces[0], sum(trace.runs for trace in traces), seen, means)


def prune(trace: Trace, *, kept_runs: int = KEPT_RUNS) -> Trace:
    """Forgets what is long ago: of twice as many runs as `kept_runs`, or more, so many count; rare blocks go."""
    if trace.runs < 2 * kept_runs:  # scaled more often, rounding would decide
        return trace
    scaled = {
        number: (2 * times * kept_runs + trace.runs - 1) // (2 * trace.runs)
        for number, times in zip(trace.blocks, trace.seen, strict=True)
    }
    seen = {number: times for number, times in scaled.items() if times}
    return _make(trace, kept_runs, seen, dict(zip(trace.blocks, trace.first_ms, strict=True)))


def _make(like: Trace, runs: int, seen: dict[int, int], first_ms: dict[int, float] | dict[int, int]) -> Trace:
    def order(number: int) -> tuple[bool, float, int]:
        return 2 * seen[number] < runs, first_ms[number], number

    kept: Iterable[int] = seen
    if len(seen) > MOST_TRACED:  # those seen most often
        kept = sorted(seen, key=lambda number: (-seen[number], first_ms[number], number))[:MOST_TRACED]
    blocks = sorted(kept, key=order)
    return Trace(
        tree=like.tree,
        workload=like.workload,
        runs=min(runs, MOST_RUNS),
        blocks=blocks,
        seen=[min(seen[number], runs, MOST_RUNS) for number in blocks],
        first_ms=[min(round(first_ms[number]), MOST_MS) for number in blocks],
    )


def _find_wrong(trace: Trace, tree: str, block_count: int | None) -> str:
    """What does not add up; empty when all does."""
    count = len(trace.blocks)
    if trace.tree != tree:
        return f"is of another tree, {trace.tree[:80]!r}"
    if not _WORKLOAD.fullmatch(trace.workload):
        return f"has an impossible workload, {trace.workload[:80]!r}"
    if not 1 <= trace.runs <= MOST_RUNS:
        return f"is of {trace.runs} runs"
    if count > MOST_TRACED or len(trace.seen) != count or len(trace.first_ms) != count:
        return f"has {count} blocks, {len(trace.seen)} counts and {len(trace.first_ms)} times"
    if not count:
        return ""
    if min(trace.blocks) < 0 or (block_count is not None and max(trace.blocks) >= block_count):
        return "names a block that the tree does not have"
    if len(set(trace.blocks)) != count:
        return "names a block twice"
    if min(trace.seen) < 1 or max(trace.seen) > trace.runs:
        return "has seen a block more often than it ran"
    if min(trace.first_ms) < 0 or max(trace.first_ms) > MOST_MS:
        return "has an impossible time"
    return ""
