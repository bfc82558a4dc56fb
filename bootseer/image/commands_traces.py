"""Hot traces of a tree: all that are known, what they say of files, published, and carried over to another tree.

Recordings of this node are in its cache, those of all nodes in the tree's store, signed. What cannot be believed
or read is told and passed over: a trace costs a start its prefetch, never more.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from bootseer import aio
from bootseer.blocks import trace as traces
from bootseer.blocks.trace import ANY_WORKLOAD, MOST_PAYLOAD_BYTES, Trace
from bootseer.errors import BootseerError, ConfigError, StorageError
from bootseer.image.commands import Say, is_registry, try_node_folder
from bootseer.mounts.tree_traces import ALL_TRACES, PAYLOAD_TYPE, list_stored, publish_traces, read_stored
from bootseer.storage import Store
from bootseer.storage.os_errors import map_os_errors
from bootseer.storage.paths import scheme_of
from bootseer.tree.index import BLOCK_UNITS, HOLE, Index
from bootseer.tree.materialise_plan import files_of, plan
from bootseer.tree.opening import OpenedTree
from bootseer.trust import SigningKey, Trust, seal

_OWN = re.compile(r"trace-([0-9a-f]{16})\.json")
_WORKLOAD = re.compile(r"[0-9a-f]{16}")


class KnownTrace(NamedTuple):
    """A trace, and where it is."""

    trace: Trace
    where: str
    is_own: bool  # recorded on this node; else of the store


# ---- what is known -----------------------------------------------------------------------------------------


def known_traces(
    store: Store, digest: str, block_count: int, trust: Trust, say: Say, *, workload: str = ""
) -> list[KnownTrace]:
    """All of a tree: those of this node first, both by workload.

    Of a store that lists nothing (a web server): that of `workload`, and the one of all together.
    """
    found = list(_own_traces(try_node_folder(digest, say), digest, block_count, say))
    return found + aio.run_sync(stored_traces(store, digest, block_count, trust, say, workload=workload))


def hot_blocks(known: Sequence[KnownTrace], workload: str = "") -> list[int]:
    """Blocks to fetch ahead, in order: of a workload, or one for anything; without a workload, of all together."""
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
    """What stands for a workload: its key, `any`, or a command. Raises: ConfigError."""
    if text == "any":
        return ANY_WORKLOAD
    if text and not _WORKLOAD.fullmatch(text):
        raise ConfigError(f"--workload {text!r}: 16 hex digits, as `bootseer image hot show` shows them, or any")
    return text


def _own_traces(folder: str, digest: str, block_count: int, say: Say) -> Iterator[KnownTrace]:
    try:
        names = sorted(os.listdir(folder)) if folder else []
    except FileNotFoundError:
        return
    except OSError as error:
        say(f"warning: {folder}: cannot be listed: {error.strerror}")
        return
    for name in names:
        if (matched := _OWN.fullmatch(name)) is None:
            continue
        path = os.path.join(folder, name)
        try:
            trace = traces.decode(read_file(path), digest, block_count, path)
        except BootseerError as error:
            say(f"warning: a trace is not used: {error}")
            continue
        if trace.workload == matched[1]:
            yield KnownTrace(trace, path, is_own=True)


async def stored_traces(
    store: Store, digest: str, block_count: int, trust: Trust, say: Say, *, workload: str = ""
) -> list[KnownTrace]:
    """Those of the store that are believed; `say` is told of the others."""
    is_listed = True
    try:
        names = await list_stored(store, digest)
    except StorageError as error:
        if not is_web(store.url):
            say(f"warning: the traces of the store are not used: {error}")
            return []
        is_listed = False
        # The last one is in the one before it, if that was published.
        names = [*([workload] if workload not in ("", ANY_WORKLOAD) else ()), ALL_TRACES, ANY_WORKLOAD]
    found: list[KnownTrace] = []
    for name in names:
        if not is_listed and any(each.trace.workload == ANY_WORKLOAD for each in found):
            break
        there = await read_stored(store, digest, name, block_count, trust, say)
        if there is not None:
            found.append(KnownTrace(there.trace, there.where, is_own=False))
    return found


def is_web(url: str) -> bool:
    """Whether it is a web server's, which lists nothing."""
    return scheme_of(url) in ("http", "https")


def read_file(path: str) -> bytes:
    """A trace in a file: without following a link at its end, and no more than any trace has."""
    with map_os_errors(path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            return file.read(MOST_PAYLOAD_BYTES + 1)


# ---- files ---------------------------------------------------------------------------------------------------


class HotFile(NamedTuple):
    """A file that a start needs."""

    path: str
    blocks: int  # of it, that are hot


def hot_files(index: Index, hot: Sequence[int]) -> list[HotFile]:
    """Files in the order in which a start touches them, as far as the blocks say."""
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


def with_sources(index: Index, hot: Sequence[int]) -> list[int]:
    """PURE: with the blocks of the sources of compiled Python modules: a start looks whether they are there.

    It reads none of them, so that no recording has them; but a module without its source cannot be imported.
    """
    entries = {index.path(entry): entry for entry in files_of(index)}
    wanted = dict.fromkeys(hot)
    for each in hot_files(index, hot):
        folder, cache, name = f"/{each.path}".rpartition("/__pycache__/")
        if cache and name.endswith(".pyc"):
            source = entries.get(os.fsencode(f"{folder}/{name.partition('.')[0]}.py"[1:]))
            if source is not None:
                wanted |= dict.fromkeys(number for number in _piece_blocks(index, source) if number != HOLE)
    return list(wanted)


# ---- published -----------------------------------------------------------------------------------------------


def publish(tree: OpenedTree, url: str, found: Iterable[Trace], key: SigningKey | None, say: Say) -> None:
    """Puts traces into the tree's store, whatever it had of the same workloads goes.

    Raises: StorageError, also for a store that cannot be written to.
    """
    if key is None:
        say("warning: the trace is not signed: only who owns the tree's folder will use it")
    found = list(found)
    if is_registry(url):
        aio.run_sync(_push(url, [seal(traces.encode(trace), PAYLOAD_TYPE, key) for trace in found]))
    else:
        aio.run_sync(publish_traces(tree.store, found, tree.index.block_count, key, Trust.load(), say))


async def _push(url: str, found: Sequence[bytes]) -> None:
    from bootseer.image.artifacts import push_trace
    from bootseer.image.references import parse_reference
    from bootseer.image.registry import Registry

    async with Registry() as registry:
        for data in found:
            await push_trace(registry, parse_reference(url), data)


# ---- to another tree ---------------------------------------------------------------------------------------


def carry(old: Index, trace: Trace, new: Index, digest: str) -> Trace | None:
    """PURE: what a trace of `old` says of `new`, the tree `digest`: files of the same path, by their pieces.

    None when they have nothing of it in common.
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
    """The block of each piece of a file, or HOLE."""
    for _, address, _ in index.pieces(entry):
        yield HOLE if address == HOLE else address // BLOCK_UNITS
