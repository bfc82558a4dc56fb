"""What a start has read of an environment that set-up has just made, as a recording of the tree that became of it.

Who builds an environment reads its own files, through no mount that could record; whoever mounts the tree later
prefetches by this. In: files and ranges in the order of their first use, from the one who started ranks. Out: a
trace in the environment's store, if that has none for this workload, and beside it what was imported.
"""

from __future__ import annotations

import os
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from bootseer import aio
from bootseer.blocks.trace import MOST_TRACED, Trace, recording_name
from bootseer.env import hot_imports
from bootseer.env.layout import below, tree_folder
from bootseer.mounts.tree_traces import share_trace
from bootseer.storage.open import open_store
from bootseer.tree.head import split_pin
from bootseer.tree.index import BLOCK_UNITS, HOLE, Index

if TYPE_CHECKING:
    from bootseer.env.setup_keeper_publish import Made
    from bootseer.env.store import EnvStore


class Touched(NamedTuple):
    """A file that a start has read."""

    path: str  # absolute
    ranges: Sequence[tuple[int, int]]  # offset and bytes; none: all of it


def share(
    envs: EnvStore,
    made: Made,
    touched: Iterable[Touched],
    imports: Sequence[str],
    workload: str,
    log: Callable[[str], object],
) -> bool:
    """Puts the recording and hot imports into the store, if that has none; whether it did.

    Raises: StorageError.
    """
    blocks = list(blocks_of(made.built, made.targets, without_links(touched)))[:MOST_TRACED]
    if not blocks:
        return False
    trace = Trace(
        tree=made.digest,
        workload=workload,
        runs=1,
        blocks=blocks,
        seen=[1] * len(blocks),
        first_ms=list(range(len(blocks))),  # in this order; when it was nobody has seen
        recordings=[recording_name(time.time(), random.getrandbits(63))],
    )
    return aio.run_sync(_put(envs, made, trace, imports, log))


async def _put(
    envs: EnvStore, made: Made, trace: Trace, imports: Sequence[str], log: Callable[[str], object]
) -> bool:
    store = open_store(below(split_pin(envs.url)[0], tree_folder(made.key)))  # as who mounts it has it
    try:
        is_shared = await share_trace(store, trace, made.built.block_count, envs.trust, log)
        return await hot_imports.share(store, made.digest, trace.workload, imports, envs.trust, log) or is_shared
    finally:
        await store.aclose()


def without_links(touched: Iterable[Touched]) -> Iterator[Touched]:
    """By the paths that targets have: modules are listed under the names by which they were found."""
    folders: dict[str, str] = {}
    for each in touched:
        folder, slash, name = each.path.rpartition("/")
        if folder not in folders:
            folders[folder] = os.path.realpath(folder)
        yield each._replace(path=folders[folder] + slash + name)


def blocks_of(index: Index, targets: Sequence[str], touched: Iterable[Touched]) -> Iterator[int]:
    """PURE: numbers of the blocks that hold what was touched, each once, in that order.

    Of a source whose bytecode is in the tree they are those of the bytecode: who mounts it reads no source, even
    where the one that built it had none compiled.
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
        is_replaced = bytecode and bytecode not in known  # what is read beside its bytecode is read as it is
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
    """Entries of bytecode, by the paths of their sources."""
    found = {}
    for path, entry in entries.items():
        folder, _, name = path.rpartition(b"/__pycache__/")
        if folder and name.endswith(b".pyc") and b".opt-" not in name:
            found[folder + b"/" + name.partition(b".")[0] + b".py"] = entry
    return found


def _entries(index: Index) -> dict[bytes, int]:
    """Entries by their paths."""
    paths = [b""]
    for parent, name in zip(index.parents[1:], index.names[1:], strict=True):
        paths.append(paths[parent] + b"/" + name if paths[parent] else name)
    return {path: entry for entry, path in enumerate(paths)}


def _touched_pieces(
    pieces: list[tuple[int, int, int]], ranges: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Those that have something of the ranges, in the order of these; without ranges all."""
    if not ranges:
        yield from pieces
    for begin, size in ranges:
        for piece in pieces[max(0, bisect_right(pieces, begin, key=itemgetter(0)) - 1) :]:
            offset, _, length = piece
            if offset >= begin + size:
                break
            if begin < offset + length:
                yield piece
