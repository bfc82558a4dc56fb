"""The access trace of a start in an environment that set-up has just made.

A builder reads its own files, without a mount that could record; later mounts of the tree prefetch by this trace.
In: files and ranges in the order of their first use, from the process that started the ranks. Out: a trace in the
environment's store, if it has none for this workload, and the list of imports beside it.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from bootseer import aio
from bootseer.blocks.trace import MAX_TRACED, Trace, recording_name
from bootseer.env.capture import hot_imports
from bootseer.env.store_layout import below, tree_directory
from bootseer.jitter import getrandbits
from bootseer.mounts.tree_daemon.traces import share_trace
from bootseer.storage.open import open_store
from bootseer.tree.head import split_pin
from bootseer.tree.index import BLOCK_UNITS, HOLE, Index

if TYPE_CHECKING:
    from bootseer.env.service.publish import PublishedTree
    from bootseer.env.store.store import EnvStore


class AccessedFile(NamedTuple):
    """A file that a start has read."""

    path: str  # absolute
    ranges: Sequence[tuple[int, int]]  # offset and bytes; empty: the whole file


def share(
    envs: EnvStore,
    made: PublishedTree,
    touched: Iterable[AccessedFile],
    imports: Sequence[str],
    workload: str,
) -> bool:
    """Store the trace and the imports, if the store has none. Return whether it did. Raises: StorageError."""
    blocks = list(blocks_of(made.built, made.targets, without_links(touched)))[:MAX_TRACED]
    if not blocks:
        return False
    trace = Trace(
        tree=made.digest,
        workload=workload,
        runs=1,
        blocks=blocks,
        seen=[1] * len(blocks),
        first_ms=list(range(len(blocks))),  # in this order; times are unknown
        recordings=[recording_name(time.time(), getrandbits(63))],
    )
    return aio.run_sync(_put(envs, made, trace, imports))


async def _put(envs: EnvStore, made: PublishedTree, trace: Trace, imports: Sequence[str]) -> bool:
    store = open_store(below(split_pin(envs.url)[0], tree_directory(made.key)))  # as a mount opens it
    try:
        is_shared = await share_trace(store, trace, made.built.block_count, envs.trust)
        return await hot_imports.share(store, made.digest, trace.workload, imports, envs.trust) or is_shared
    finally:
        await store.aclose()


def without_links(touched: Iterable[AccessedFile]) -> Iterator[AccessedFile]:
    """Yield files by their resolved paths: modules are listed under the names by which they were found."""
    directories: dict[str, str] = {}
    for each in touched:
        directory, slash, name = each.path.rpartition("/")
        if directory not in directories:
            directories[directory] = os.path.realpath(directory)
        yield each._replace(path=directories[directory] + slash + name)


def blocks_of(index: Index, targets: Sequence[str], touched: Iterable[AccessedFile]) -> Iterator[int]:
    """PURE: yield the numbers of the blocks of accessed files, each once, in that order.

    For a source with bytecode in the tree, the blocks of the bytecode are used: a mounted environment reads no
    source. The builder may have had no bytecode.
    """
    entries = _entries(index)
    compiled = _compiled(entries)
    places = {target.rstrip("/") + "/": f"{number}/" for number, target in enumerate(targets)}
    seen: set[int] = set()
    found: list[tuple[bytes, Sequence[tuple[int, int]]]] = []
    for each in touched:
        begin = next((begin for begin in places if each.path.startswith(begin)), "")
        if begin:
            found.append((os.fsencode(places[begin] + each.path[len(begin) :]), each.ranges))
    known = {entries.get(path) for path, _ in found}
    for path, ranges in found:
        bytecode = compiled.get(path, 0)
        # a source that is read beside its bytecode is used itself
        is_replaced = bytecode and bytecode not in known
        entry = bytecode if is_replaced else entries.get(path, 0)
        if not entry:
            continue
        entry = index.links[entry] if index.links[entry] >= 0 else entry
        pieces = [(offset, address, length) for offset, address, length in index.pieces(entry) if address != HOLE]
        for _, address, _ in _touched_pieces(pieces, () if is_replaced else ranges):
            number = address // BLOCK_UNITS
            if number not in seen:
                seen.add(number)
                yield number


def _compiled(entries: Mapping[bytes, int]) -> dict[bytes, int]:
    """Return entries of bytecode, by the paths of their sources."""
    found = {}
    for path, entry in entries.items():
        directory, _, name = path.rpartition(b"/__pycache__/")
        if directory and name.endswith(b".pyc") and b".opt-" not in name:
            found[directory + b"/" + name.partition(b".")[0] + b".py"] = entry
    return found


def _entries(index: Index) -> dict[bytes, int]:
    """Return entries by their paths."""
    paths = [b""]
    for parent, name in zip(index.parents[1:], index.names[1:], strict=True):
        paths.append(paths[parent] + b"/" + name if paths[parent] else name)
    return {path: entry for entry, path in enumerate(paths)}


def _touched_pieces(
    pieces: list[tuple[int, int, int]], ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Yield pieces that overlap the ranges, in the order of the ranges; all without ranges."""
    if not ranges:
        yield from pieces
    for begin, size in ranges:
        for piece in pieces[max(0, bisect_right(pieces, begin, key=itemgetter(0)) - 1) :]:
            offset, _, length = piece
            if offset >= begin + size:
                break
            if begin < offset + length:
                yield piece
