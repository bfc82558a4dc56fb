"""`bootseer image hot`: shows the access traces of a tree, merges those of nodes, prunes rarely needed blocks."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.blocks import trace as traces
from bootseer.blocks.trace import Trace
from bootseer.blocks.tree_files import write_whole
from bootseer.errors import ConfigError, IntegrityError
from bootseer.image.commands.common import Signing, opened, shown, tree_url
from bootseer.image.commands.traces import LocatedTrace, known_traces, publish, read_file
from bootseer.mounts.tree_daemon.traces import renew_all
from bootseer.storage.os_errors import map_os_errors
from bootseer.tree.index import Index
from bootseer.tree.opening import OpenedTree
from bootseer.trust import Trust


class ShownTrace(NamedTuple):
    workload: str
    runs: int
    blocks: int  # traced
    hot_blocks: int
    hot_bytes: int  # as stored
    last_ms: int  # first touch of the last hot block
    where: str


def show(url: str, *, name: str) -> tuple[OpenedTree, list[ShownTrace], list[LocatedTrace]]:
    url, trust = tree_url(url), Trust.load()
    with opened(url, name=name, trust=trust) as tree:
        known = known_traces(tree.store, tree.digest, tree.index.block_count, trust)
    return tree, [_shown(tree.index, each) for each in known], known


def merge(
    url: str, files: Sequence[str], *, name: str, workload: str, output: str, signing: Signing
) -> list[ShownTrace]:
    """Merge the traces of this node, the store and `files` into the store or the file `output`.

    Raises: ConfigError if there is none; StorageError; IntegrityError for files that are not traces of the tree.
    """
    url, trust = tree_url(url), Trust.load()
    with opened(url, name=name, trust=trust) as tree:
        known = known_traces(tree.store, tree.digest, tree.index.block_count, trust)
        for path in files:
            known.append(LocatedTrace(_decode_given(path, tree), path, is_own=False))
        by_workload: dict[str, list[Trace]] = {}
        for each in known:
            if not workload or each.trace.workload == workload:
                by_workload.setdefault(each.trace.workload, []).append(each.trace)
        if not by_workload:
            raise ConfigError(f"{shown(url)}: has no access trace; record one with `bootseer image record`")
        if output and len(by_workload) > 1:
            raise ConfigError(f"{output}: a file has one workload; name it with --workload: {_list(by_workload)}")
        merged = [traces.prune(traces.merge(each)) for each in by_workload.values()]
        where = output or shown(url)
        if output:
            write_file(output, traces.encode(merged[0]))
        else:
            publish(tree, url, merged, signing.key(trust))
        return [_shown(tree.index, LocatedTrace(each, where, is_own=False)) for each in merged]


def prune(
    url: str, *, name: str, workload: str, share: float, forgets: bool, signing: Signing
) -> list[ShownTrace]:
    """Remove blocks that less than `share` of the recordings saw, here and in the store; or whole traces."""
    url, trust = tree_url(url), Trust.load()
    with opened(url, name=name, trust=trust) as tree:
        known = known_traces(tree.store, tree.digest, tree.index.block_count, trust)
        known = [each for each in known if not workload or each.trace.workload == workload]
        if forgets:
            for each in known:
                if each.is_own:
                    with map_os_errors(each.where):
                        os.unlink(each.where)
                else:
                    aio.run_sync(tree.store.delete(f"traces/{tree.digest}/{each.trace.workload}.json"))
            if not all(each.is_own for each in known):
                count, key = tree.index.block_count, signing.key(trust)
                aio.run_sync(renew_all(tree.store, tree.digest, count, key, trust))
            return []
        kept = []
        for each in known:
            pruned = drop_rare(each.trace, share)
            kept.append(each._replace(trace=pruned))
            if pruned == each.trace:
                continue
            if each.is_own:
                with map_os_errors(each.where):
                    write_whole(os.path.dirname(each.where), os.path.basename(each.where), traces.encode(pruned))
            else:
                publish(tree, url, [pruned], signing.key(trust))
        return [_shown(tree.index, each) for each in kept]


def drop_rare(trace: Trace, share: float) -> Trace:
    """PURE: return only the blocks that at least this share of the recordings saw, in their order."""
    kept = [place for place, seen in enumerate(trace.seen) if seen >= share * trace.runs]
    return msgspec.structs.replace(
        trace,
        blocks=[trace.blocks[place] for place in kept],
        seen=[trace.seen[place] for place in kept],
        first_ms=[trace.first_ms[place] for place in kept],
    )


def write_file(path: str, data: bytes) -> None:
    """Write a file of the user's, in one step."""
    directory, name = os.path.split(os.path.abspath(path))
    with map_os_errors(path):
        write_whole(directory, name, data)


def _decode_given(path: str, tree: OpenedTree) -> Trace:
    data = read_file(path)
    try:
        return traces.decode(data, tree.digest, tree.index.block_count, path)
    except IntegrityError as error:
        raise type(error)(f"{error}; give a file from `bootseer image hot merge --output FILE`") from error


def _shown(index: Index, each: LocatedTrace) -> ShownTrace:
    trace = each.trace
    hot = trace.hot()
    times = dict(zip(trace.blocks, trace.first_ms, strict=True))
    return ShownTrace(
        trace.workload,
        trace.runs,
        len(trace.blocks),
        len(hot),
        sum(index.block(number).stored_bytes for number in hot),
        max((times[number] for number in hot), default=0),
        each.where,
    )


def _list(workloads: Iterable[str]) -> str:
    return ", ".join(sorted(workloads))
