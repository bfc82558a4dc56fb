"""A node of `bench peers` that starts: brings two trees into its cache and reads a checkpoint's units.

`python -m bench.peers_node`; a line of JSON (`Task`) comes in, `ready` goes out; a line comes, `done` goes out;
a line comes, JSON goes out.
The trees come as a mounted image's hot blocks do (`Prefetcher`), the units as a loader reads them. All of it is
verified by digests, and after the clock has stopped once more from what is in the cache.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import msgspec

from bootseer import aio
from bootseer.blocks.cache import Cache
from bootseer.blocks.fetch import BlockFetcher
from bootseer.blocks.prefetch import Prefetcher
from bootseer.cache_folder import Limit
from bootseer.peers import helpers, open_peer_store
from bootseer.storage import RangeReader, RangeRequest, SecondHand
from bootseer.tree import index as indexes
from bootseer.tree.opening import read_index_bytes

UNIT_BYTES = 16 << 20
UNITS_AT_ONCE = 4


RECEIVERS = {
    "now": ("bootseer.peers.peer", "Peer"),
    "before": ("bench.peers_before", "Peer"),
    "buffered": ("bench.peers_buffered", "BufferedPeer"),
    "buffered_low": ("bench.peers_buffered", "BufferedLowWaterPeer"),
}


class Task(msgspec.Struct):
    """What a node has to bring."""

    url: str  # of the store
    peers: str  # path of the file of the job's peers; "": the store alone
    folder: str  # for the cache
    trees: dict[str, str]  # digests, by folder
    object: str  # path of the checkpoint
    size: int
    sums: list[str]  # SHA-256 of its units, hex
    receiver: str = "now"  # one of RECEIVERS


class Fetched(NamedTuple):
    """What came, and how its sum is found out afterwards."""

    missing: int  # blocks
    wrong: int  # blocks or units that came with other bytes
    statistics: dict[str, int]  # of the store
    sum: Callable[[], str]


async def bring_tree(task: Task, name: str, stack: AsyncExitStack) -> Fetched:
    """Into the node's cache, which `stack` closes."""
    digest = task.trees[name]
    store = open_peer_store(f"{task.url}/{name}", task.peers)
    stack.push_async_callback(store.aclose)
    data = await read_index_bytes(store, digest)
    # Not in threads: msgspec crashes when two of them decode a type for the first time at the same moment.
    index = indexes.decode(data, digest, name)
    cache = Cache(os.path.join(task.folder, name), limit=Limit(share=1.0))
    kept = stack.enter_context(cache.open_tree(digest, index.block_count))
    fetcher = BlockFetcher(index, kept, [store])
    stack.push_async_callback(fetcher.aclose)
    await Prefetcher(fetcher, range(index.block_count)).run()

    def sum_up() -> str:
        found = hashlib.sha256()
        for number in range(index.block_count):
            raw = kept.try_read_block(number, index.block(number).raw_bytes)
            found.update(b"missing" if raw is None else raw)
        return found.hexdigest()

    missing = len(kept.missing(range(index.block_count)))
    return Fetched(missing, int(fetcher.statistics()["wrong_blocks"]), store.statistics(), sum_up)


async def bring_object(task: Task, stack: AsyncExitStack) -> Fetched:
    """Into memory. Wrong units are read once more, from the store."""
    store = open_peer_store(task.url, task.peers)
    stack.push_async_callback(store.aclose)
    reader = RangeReader(store)
    memory = memoryview(bytearray(task.size))
    wrong = 0

    async def bring(number: int) -> None:
        nonlocal wrong
        offset = number * UNIT_BYTES
        view = memory[offset : offset + UNIT_BYTES]
        for attempt in range(2):
            await reader.read([RangeRequest(task.object, offset, view)], attempt=attempt)
            if await aio.run_io(_sum, view) == task.sums[number]:
                return
            wrong += 1
            if isinstance(store, SecondHand):
                store.distrust(task.object, offset, len(view))
        raise RuntimeError(f"unit {number} is wrong")

    await aio.map_bounded(bring, range(len(task.sums)), width=UNITS_AT_ONCE)
    return Fetched(0, wrong, store.statistics(), lambda: _sum(memory))


async def bring_all(task: Task) -> dict[str, Any]:
    """Everything at once, as a start does. When it is there, says so, and waits with the sums for a line."""
    began_ns, cpu_began_s = time.monotonic_ns(), time.process_time()
    async with AsyncExitStack() as stack:
        trees = (bring_tree(task, name, stack) for name in task.trees)
        parts = await asyncio.gather(*trees, bring_object(task, stack))
        ended_ns, cpu_s = time.monotonic_ns(), time.process_time() - cpu_began_s
        print("done", flush=True)
        await aio.run_io(sys.stdin.readline)  # the sums would take the others' processors
        statistics: dict[str, int] = {}
        for part in parts:
            for name, count in part.statistics.items():
                statistics[name] = statistics.get(name, 0) + count
        return {
            "began_ns": began_ns,
            "ended_ns": ended_ns,
            "cpu_s": cpu_s,
            "sums": [part.sum() for part in parts],
            "missing": sum(part.missing for part in parts),
            "wrong": sum(part.wrong for part in parts),
            "statistics": statistics,
        }


def receive_by(receiver: str) -> None:
    """Replaces the product's reader of one peer, in this process."""
    module, name = RECEIVERS[receiver]
    setattr(helpers, "Peer", getattr(importlib.import_module(module), name))  # noqa: B010


def _sum(view: memoryview) -> str:
    return hashlib.sha256(view).hexdigest()


def main() -> int:
    """One start."""
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    receive_by(task.receiver)
    print("ready", flush=True)
    if sys.stdin.readline():
        print(json.dumps(asyncio.run(bring_all(task))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
