"""What is special to files in memory."""

from __future__ import annotations

import asyncio
import threading

import pytest

from bootseer.errors import AlreadyExists, NotFound
from bootseer.storage import memory, open_store
from tests.testing.store_suite import read, runs


@runs()
async def test_a_name_is_one_place() -> None:
    one, same, below = (open_store(url) for url in ("memory://shared", "memory://shared/", "memory://shared/a/b"))
    other = open_store("memory://other")
    await one.publish("a/b/file.bin", b"abc")
    assert await read(same, "a/b/file.bin", 0, 3) == b"abc"
    assert await read(below, "file.bin", 0, 3) == b"abc"
    with pytest.raises(NotFound):
        await other.stat("a/b/file.bin")
    memory.forget("shared")
    with pytest.raises(NotFound):
        await open_store("memory://shared").stat("a/b/file.bin")


def test_one_winner_among_threads() -> None:
    winners: list[int] = []
    barrier = threading.Barrier(16)

    def publish(number: int) -> None:
        store = open_store("memory://threads")
        barrier.wait(10)
        try:
            asyncio.run(store.publish("file.bin", bytes([number]), if_absent=True))
        except AlreadyExists:
            return
        winners.append(number)

    threads = [threading.Thread(target=publish, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert asyncio.run(read(open_store("memory://threads"), "file.bin", 0, 1)) == bytes(winners)
    memory.forget("threads")
