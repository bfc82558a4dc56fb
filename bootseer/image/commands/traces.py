"""Access traces of a tree: all known ones, their hot files, publication, and conversion to another tree.

Traces of this node are in its cache, those of all nodes in the tree's store, signed. An untrusted or unreadable
trace is reported and skipped: it costs a start its prefetch, never more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.blocks import trace as traces
from bootseer.blocks.trace import ANY_WORKLOAD, MAX_PAYLOAD_BYTES, Trace
from bootseer.errors import BootseerError, ConfigError, StorageError
from bootseer.image.commands.common import is_registry, try_node_directory
from bootseer.logs import get_logger
from bootseer.mounts.tree_daemon.traces import ALL_TRACES, PAYLOAD_TYPE, list_stored, publish_traces, read_stored
from bootseer.storage import Store
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.paths import is_web
from bootseer.tree.index import BLOCK_UNITS, HOLE, Index
from bootseer.tree.opening import OpenedTree
from bootseer.tree.unpack.plan import files_of, plan
from bootseer.trust import SigningKey, Trust, seal

_log = get_logger(__name__)

_OWN = re.compile(r"trace-([0-9a-f]{16})\.json")
_WORKLOAD = re.compile(r"[0-9a-f]{16}")


class LocatedTrace(NamedTuple):
    trace: Trace
    where: str
    is_own: bool  # recorded on this node; otherwise of the store


# ---- known traces -----------------------------------------------------------------------------------------


def known_traces(
    store: Store, digest: str, block_count: int, trust: Trust, *, workload: str = ""
) -> list[LocatedTrace]:
    """Return all traces of a tree: those of this node first, both by workload.

    In a store that cannot list (a web server): that of `workload`, and the one of all together.
    """
    found = list(_own_traces(try_node_directory(digest), digest, block_count))
    return found + aio.run_sync(stored_traces(store, digest, block_count, trust, workload=workload))


def hot_blocks(known: Sequence[LocatedTrace], workload: str = "") -> list[int]:
    """Return blocks to prefetch, in order: of a workload, or the trace for any; without a workload, of all."""
    best: dict[str, Trace] = {}
    for each in known:
        best.setdefault(each.trace.workload, each.trace)
    if workload:
        chosen = best.get(workload) or best.get(ANY_WORKLOAD)
        return chosen.hot() if chosen is not None else []
    first_ms: dict[int, int] = {}
    for trace in best.values():
        times = dict(zip(trace.blocks, trace.first_ms, strict=True))
        for number in trace.hot():
            first_ms[number] = min(times[number], first_ms.get(number, times[number]))
    return sorted(first_ms, key=lambda number: (first_ms[number], number))


def check_workload(text: str) -> str:
    """Parse a workload: its key, `any`, or "". Raises: ConfigError."""
    if text == "any":
        return ANY_WORKLOAD
    if text and not _WORKLOAD.fullmatch(text):
        raise ConfigError(f"--workload {text!r}: must be 16 hex digits, as in `bootseer image hot show`, or any")
    return text


def _own_traces(directory: str, digest: str, block_count: int) -> Iterator[LocatedTrace]:
    try:
        names = sorted(os.listdir(directory)) if directory else []
    except FileNotFoundError:
        return
    except OSError as error:
        _log.warning("%s: cannot be listed: %s", directory, error.strerror)
        return
    for name in names:
        if (matched := _OWN.fullmatch(name)) is None:
            continue
        path = os.path.join(directory, name)
        try:
            trace = traces.decode(read_file(path), digest, block_count, path)
        except BootseerError as error:
            _log.warning("a trace is not used: %s", error)
            continue
        if trace.workload == matched[1]:
            yield LocatedTrace(trace, path, is_own=True)


async def stored_traces(
    store: Store, digest: str, block_count: int, trust: Trust, *, workload: str = ""
) -> list[LocatedTrace]:
    """Return the trusted traces of the store; log the others."""
    is_listed = True
    try:
        names = await list_stored(store, digest)
    except StorageError as error:
        if not is_web(store.url):
            _log.warning("the traces of the store are not used: %s", error)
            return []
        is_listed = False
        # The last one is included in the one before it, if that was published.
        names = [*([workload] if workload not in ("", ANY_WORKLOAD) else ()), ALL_TRACES, ANY_WORKLOAD]
    found: list[LocatedTrace] = []
    for name in names:
        if not is_listed and any(each.trace.workload == ANY_WORKLOAD for each in found):
            break
        there = await read_stored(store, digest, name, block_count, trust)
        if there is not None:
            found.append(LocatedTrace(there.trace, there.where, is_own=False))
    return found


def read_file(path: str) -> bytes:
    """Read a trace file, without following a final link, and with a limit of its size."""
    with map_os_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            return file.read(MAX_PAYLOAD_BYTES + 1)


# ---- files ---------------------------------------------------------------------------------------------------


class HotFile(NamedTuple):
    """A file that a start needs."""

    path: str
    blocks: int  # hot ones of the file


def hot_files(index: Index, hot: Sequence[int]) -> list[HotFile]:
    """Return files in the order in which a start touches them, as far as the blocks show."""
    order = {number: place for place, number in enumerate(hot)}
    todo = plan(index, files_of(index), hot)
    first: dict[int, int] = {}
    count: dict[int, int] = {}
    for number, writes in todo.writes.items():
        if number not in order:
            continue
        for write in writes:
            if write.entry in todo.hot_files:
                first[write.entry] = min(order[number], first.get(write.entry, order[number]))
                count[write.entry] = count.get(write.entry, 0) + 1
    ordered = sorted(first, key=lambda entry: (first[entry], entry))
    return [HotFile(os.fsdecode(index.path(entry)), count[entry]) for entry in ordered]


def add_sources(index: Index, hot: Sequence[int]) -> list[int]:
    """PURE: add the blocks of the sources of compiled Python modules, whose presence a start checks.

    A start does not read them, so no trace has them; but a module without its source cannot be imported.
    """
    entries = {index.path(entry): entry for entry in files_of(index)}
    wanted = dict.fromkeys(hot)
    for each in hot_files(index, hot):
        directory, cache, name = f"/{each.path}".rpartition("/__pycache__/")
        if cache and name.endswith(".pyc"):
            source = entries.get(os.fsencode(f"{directory}/{name.partition('.')[0]}.py"[1:]))
            if source is not None:
                wanted |= dict.fromkeys(number for number in _piece_blocks(index, source) if number != HOLE)
    return list(wanted)


# ---- published -----------------------------------------------------------------------------------------------


def publish(tree: OpenedTree, url: str, found: Iterable[Trace], key: SigningKey | None) -> None:
    """Publish traces in the tree's store; they replace those of the same workloads.

    Raises: StorageError, also for a store that cannot be written to.
    """
    if key is None:
        _log.warning("the trace is not signed: only the owner of the tree's directory will use it")
    found = list(found)
    if is_registry(url):
        aio.run_sync(_push(url, [seal(traces.encode(trace), PAYLOAD_TYPE, key) for trace in found]))
    else:
        aio.run_sync(publish_traces(tree.store, found, tree.index.block_count, key, Trust.load()))


async def _push(url: str, found: Sequence[bytes]) -> None:
    from bootseer.image.artifacts import push_trace
    from bootseer.image.registry import Registry
    from bootseer.storage.oci.reference import parse_reference

    async with Registry() as registry:
        for data in found:
            await push_trace(registry, parse_reference(url), data)


# ---- to another tree ---------------------------------------------------------------------------------------


def convert_trace(old: Index, trace: Trace, new: Index, digest: str) -> Trace | None:
    """PURE: convert a trace of `old` to `new`, the tree `digest`: by the pieces of files with the same path.

    Returns None if they have nothing of it in common.
    """
    seen = dict(zip(trace.blocks, trace.seen, strict=True))
    first_ms = dict(zip(trace.blocks, trace.first_ms, strict=True))
    entries = {new.path(entry): entry for entry in files_of(new)}
    found: dict[int, tuple[int, int]] = {}  # new block -> seen, first touch
    for entry in files_of(old):
        blocks = list(_piece_blocks(old, entry))
        if not any(number in seen for number in blocks):
            continue
        other = entries.get(old.path(entry))
        if other is None:
            continue
        for number, there in zip(blocks, _piece_blocks(new, other), strict=False):
            if number in seen and there != HOLE:
                times, when = found.get(there, (0, first_ms[number]))
                found[there] = max(times, seen[number]), min(when, first_ms[number])
    if not found:
        return None
    blocks = list(found)
    carried = Trace(
        tree=digest,
        workload=trace.workload,
        runs=trace.runs,
        blocks=blocks,
        seen=[found[number][0] for number in blocks],
        first_ms=[found[number][1] for number in blocks],
        recordings=trace.recordings,
    )
    return traces.merge([carried])


def _piece_blocks(index: Index, entry: int) -> Iterator[int]:
    """Yield the block of each piece of a file, or HOLE."""
    for _, address, _ in index.pieces(entry):
        yield HOLE if address == HOLE else address // BLOCK_UNITS
