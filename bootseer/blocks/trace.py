"""Access traces: which blocks starts read, in what order and when; docs/reference/formats.md has the format. Pure.

In: traces of nodes and runs, and stored ones, which are not trusted. Out: one trace that knows how often each
block was read. So blocks that a start needs come first, and accidental reads are left out. Recordings have names:
one that arrives several times (from this node, the store, a file) counts once.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import msgspec

from bootseer.errors import FormatVersion, IntegrityError

FORMAT = "bootseer-trace/1"
ANY_WORKLOAD = "0" * 16
MAX_PAYLOAD_BYTES = 12 << 20  # base64 in an envelope of 16 MiB
MAX_RUNS = 1 << 31
MAX_TRACED = 1 << 18  # blocks: 32 GiB
MAX_MS = 1 << 31
MAX_RECORDINGS = 1024  # names kept
KEPT_RUNS = 32  # a block that was not read in a few times so many runs is forgotten
_WORKLOAD = re.compile(r"[0-9a-f]{16}")
_RECORDING = re.compile(r"[0-9a-f]{16}")
_PYTHON = re.compile(r"python[0-9.]*")


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Blocks that starts have read. Shapes: T blocks traced, in the order in which they are to be fetched."""

    format: str = FORMAT
    tree: str
    workload: str
    runs: int  # recordings in it
    blocks: list[int]  # T
    seen: list[int]  # T: in how many of the recordings
    first_ms: list[int]  # T: from the mount to the first read, mean of the recordings that have it
    recordings: list[str] = []  # names of those in it, sorted: `recording_name`; some may have none

    def hot(self) -> list[int]:
        """Return the blocks to prefetch, in order: those in at least half of the recordings."""
        return [number for number, seen in zip(self.blocks, self.seen, strict=True) if 2 * seen >= self.runs]


class _Head(msgspec.Struct):
    format: str


def workload_key(program: str, script: str) -> str:
    """Return the key of a program and its script or module, wherever they lie and with any arguments.

    All names of Python count as python3: `--image-python python3.11` has the key of a start without it.
    """
    names = [name.rstrip("/").rpartition("/")[2] for name in (program, script)]
    if _PYTHON.fullmatch(names[0]):
        names[0] = "python3"
    return hashlib.sha256("\0".join(names).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def recording_name(began_s: float, chance: int) -> str:
    """Return a unique name of a recording: its begin, in seconds since the epoch, and 32 random bits."""
    return f"{int(began_s) & 0xFFFFFFFF:08x}{chance & 0xFFFFFFFF:08x}"


def encode(trace: Trace) -> bytes:
    """Return the JSON that is signed and stored. Raises: IntegrityError for a trace that readers would reject."""
    wrong = _find_wrong(trace, trace.tree, None)
    if wrong:
        raise IntegrityError(f"this trace {wrong}")
    return msgspec.json.encode(trace)


def decode(data: bytes, tree: str, block_count: int, where: str) -> Trace:
    """Decode the trace of `tree`, which has so many blocks.

    Raises: IntegrityError for invalid data or another tree; FormatVersion.
    """
    if len(data) > MAX_PAYLOAD_BYTES:
        raise IntegrityError(f"{where}: {len(data)} bytes; no trace is larger than {MAX_PAYLOAD_BYTES}")
    try:
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            raise FormatVersion(f"{where}: has format {head.format[:80]!r}; this Bootseer reads {FORMAT}")
        trace = msgspec.json.decode(data, type=Trace)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise IntegrityError(f"{where}: is not an access trace: {error}") from error
    wrong = _find_wrong(trace, tree, block_count)
    if wrong:
        raise IntegrityError(f"{where}: {wrong}")
    return trace


def merge(traces: Sequence[Trace]) -> Trace:
    """Merge traces of one tree and one workload into one trace. The order of `traces` does not matter.

    A named recording counts once, even if several traces have it. The count is exact where one trace has all
    recordings of another, else approximate. Recordings without a name count as different ones.

    Blocks of at least half of the recordings come first; both parts are in the order of their mean first read.
    """
    if not traces or len({(trace.tree, trace.workload) for trace in traces}) != 1:
        raise ValueError("traces are merged of one tree and one workload")
    seen: dict[int, int] = {}
    total_ms: dict[int, int] = {}
    known: set[str] = set()
    runs = 0
    for trace in sorted(traces, key=_by_size):
        count = _count(trace)
        new = count - len(known.intersection(trace.recordings))
        if not new:
            continue
        known.update(trace.recordings)
        own_runs = max(1, _share(trace.runs, new, count))
        runs += own_runs
        for number, all_times, first_ms in zip(trace.blocks, trace.seen, trace.first_ms, strict=True):
            times = min(own_runs, _share(all_times, new, count))
            if times:
                seen[number] = seen.get(number, 0) + times
                total_ms[number] = total_ms.get(number, 0) + first_ms * times
    means = {number: total_ms[number] / times for number, times in seen.items()}
    return _make(traces[0], runs, seen, means, known)


def _by_size(trace: Trace) -> tuple[int, int, list[str], list[int], list[int], list[int]]:
    """Order the largest first: it already has the recordings that it shares with others."""
    return -_count(trace), -len(trace.recordings), trace.recordings, trace.blocks, trace.seen, trace.first_ms


def _count(trace: Trace) -> int:
    """Return the number of recordings merged into it; a pruned trace has more names than runs."""
    return max(trace.runs, len(trace.recordings))


def _share(number: int, part: int, whole: int) -> int:
    """Return a share of a number, rounded. Merged traces do not keep blocks by recording, so all share alike."""
    return (2 * number * part + whole) // (2 * whole)


def with_known(recorded: Trace, known: Trace) -> Trace | None:
    """Return the trace of a start whose hot blocks, of `known`, were read by others before it.

    It has those as `known` has them, and the recorded ones. None when nothing was recorded: then there is nothing
    new.
    """
    if (recorded.tree, recorded.workload) != (known.tree, known.workload):
        raise ValueError("traces of one tree and one workload")
    hot = set(known.hot())
    means: dict[int, float] = {
        number: first_ms
        for number, first_ms in zip(recorded.blocks, recorded.first_ms, strict=True)
        if number not in hot
    }
    if not means:
        return None
    means |= {
        number: first_ms for number, first_ms in zip(known.blocks, known.first_ms, strict=True) if number in hot
    }
    return _make(recorded, 1, dict.fromkeys(means, 1), means, recorded.recordings)


def prune(trace: Trace, *, kept_runs: int = KEPT_RUNS) -> Trace:
    """Scale a trace of twice `kept_runs` runs or more down to `kept_runs`; rare blocks are removed."""
    if trace.runs < 2 * kept_runs:  # scaled more often, rounding would decide
        return trace
    scaled = {
        number: (2 * times * kept_runs + trace.runs - 1) // (2 * trace.runs)
        for number, times in zip(trace.blocks, trace.seen, strict=True)
    }
    seen = {number: times for number, times in scaled.items() if times}
    first_ms = dict(zip(trace.blocks, trace.first_ms, strict=True))
    return _make(trace, kept_runs, seen, first_ms, trace.recordings)


def _make(
    like: Trace,
    runs: int,
    seen: Mapping[int, int],
    means_ms: Mapping[int, float],
    recordings: Iterable[str],
) -> Trace:
    # Rounded before ordering, so that merging a merged trace again does not change it.
    first_ms = {number: min(round(mean_ms), MAX_MS) for number, mean_ms in means_ms.items()}

    def order(number: int) -> tuple[bool, int, int]:
        return 2 * seen[number] < runs, first_ms[number], number

    kept: Iterable[int] = seen
    if len(seen) > MAX_TRACED:  # the most frequent ones
        kept = sorted(seen, key=lambda number: (-seen[number], first_ms[number], number))[:MAX_TRACED]
    blocks = sorted(kept, key=order)
    return Trace(
        tree=like.tree,
        workload=like.workload,
        runs=min(runs, MAX_RUNS),
        blocks=blocks,
        seen=[min(seen[number], runs, MAX_RUNS) for number in blocks],
        first_ms=[first_ms[number] for number in blocks],
        recordings=sorted(recordings)[-MAX_RECORDINGS:],  # the latest
    )


def _find_wrong(trace: Trace, tree: str, block_count: int | None) -> str:
    """Return what is inconsistent; empty when nothing is."""
    count = len(trace.blocks)
    if trace.tree != tree:
        return f"is of another tree, {trace.tree[:80]!r}"
    if not _WORKLOAD.fullmatch(trace.workload):
        return f"has an impossible workload, {trace.workload[:80]!r}"
    if not 1 <= trace.runs <= MAX_RUNS:
        return f"is of {trace.runs} runs"
    names = trace.recordings
    if len(names) > MAX_RECORDINGS or any(before >= name for before, name in pairwise(names)):
        return f"has {len(names)} names of recordings, which are too many or not in order"
    if not all(map(_RECORDING.fullmatch, names)):
        return "has an impossible name of a recording"
    if count > MAX_TRACED or len(trace.seen) != count or len(trace.first_ms) != count:
        return f"has {count} blocks, {len(trace.seen)} counts and {len(trace.first_ms)} times"
    if not count:
        return ""
    if min(trace.blocks) < 0 or (block_count is not None and max(trace.blocks) >= block_count):
        return "names a block that the tree does not have"
    if len(set(trace.blocks)) != count:
        return "names a block twice"
    if min(trace.seen) < 1 or max(trace.seen) > trace.runs:
        return "counts a block more often than its runs"
    if min(trace.first_ms) < 0 or max(trace.first_ms) > MAX_MS:
        return "has an impossible time"
    return ""
