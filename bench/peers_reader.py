"""A reader of `bench peers`: reads an object through the nodes of its job, and does nothing else with it.

`python -m bench.peers_reader`; a line of JSON (`Task`) comes in, `ready` goes out; a line comes, `done` goes out;
a line comes, JSON goes out. It reads as a loader of checkpoints does (`RangeReader`, units of 16 MiB), into memory
that is there before. The CPU time is that of this process from the first request to the last byte, without
its start and imports. The sum is made after the clock has stopped.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from bench.peers_node import UNIT_BYTES, UNITS_AT_ONCE, receive_by
from bootseer import aio
from bootseer.peers import open_peer_store
from bootseer.storage import RangeReader, RangeRequest


class Task(msgspec.Struct):
    """What to read, and how."""

    url: str  # of the store
    peers: str  # path of the file of the job's peers
    object: str
    size: int
    receiver: str  # one of RECEIVERS
    loop: str  # asyncio or uvloop


def new_loop(name: str) -> Callable[[], asyncio.AbstractEventLoop]:
    """Makes event loops of this kind."""
    return asyncio.new_event_loop if name == "asyncio" else importlib.import_module(name).new_event_loop


async def read_all(task: Task) -> dict[str, Any]:
    """Reads the object once; waits for a line before the clock starts, and after it has stopped."""
    store = open_peer_store(task.url, task.peers)
    try:
        reader = RangeReader(store)
        memory = memoryview(bytearray(task.size))
        print("ready", flush=True)
        await aio.run_io(sys.stdin.readline)

        async def read(offset: int) -> None:
            await reader.read([RangeRequest(task.object, offset, memory[offset : offset + UNIT_BYTES])])

        began_ns, cpu_began_s = time.monotonic_ns(), time.process_time()
        await aio.map_bounded(read, range(0, task.size, UNIT_BYTES), width=UNITS_AT_ONCE)
        ended_ns, cpu_s = time.monotonic_ns(), time.process_time() - cpu_began_s
        print("done", flush=True)
        await aio.run_io(sys.stdin.readline)
        return {
            "began_ns": began_ns,
            "ended_ns": ended_ns,
            "cpu_s": cpu_s,
            "bytes": task.size,
            "sums": [hashlib.sha256(memory).hexdigest()],
            "missing": 0,
            "wrong": 0,
            "statistics": store.statistics(),
        }
    finally:
        await store.aclose()


def main() -> int:
    """One reader."""
    task = msgspec.json.decode(sys.stdin.readline(), type=Task)
    receive_by(task.receiver)
    with asyncio.Runner(loop_factory=new_loop(task.loop)) as runner:
        print(json.dumps(runner.run(read_all(task))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
