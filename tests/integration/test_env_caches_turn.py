"""Nodes of one job make the same at the same time: it is published and uploaded once."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.env.compile_cache.caches import Captured
from bootseer.env.store.lease import BuilderLease, Lease, LeaseHolder
from bootseer.storage import open_store
from tests.integration.test_env_caches import KEY, Node
from tests.testing.faulty_store import FaultyStore

NODES, FILES, FILE_BYTES = 6, 8, 40_000


class _Counted(FaultyStore):
    """How many bytes are given to it."""

    written = 0
    _lock = threading.Lock()

    async def publish(self, path: str, data: bytes, *, if_absent: bool = False) -> Any:
        if not path.startswith("keys/"):
            with self._lock:
                _Counted.written += len(data)
        return await super().publish(path, data, if_absent=if_absent)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []
    _Counted.written = 0

    def make(name: str, **more: Any) -> Node:
        url = f"{tmp_path}/store/caches/{KEY}"
        made.append(Node(tmp_path / name, "", store=lambda: _Counted(open_store(url)), **more))
        return made[-1]

    yield make
    for each in made:
        each.caches.close()
    aio.close()


def at_once(nodes: list[Node]) -> list[Captured]:
    barrier, done = threading.Barrier(len(nodes)), dict[int, Captured]()

    def run(number: int) -> None:
        barrier.wait()
        done[number] = nodes[number].caches.capture(settle_s=0.0)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(nodes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [done[number] for number in range(len(nodes))]


def stored(tmp_path: Path) -> tuple[list[str], int]:
    """Names of generations, and bytes of packs."""
    directory = tmp_path / "store" / "caches" / KEY
    names = sorted(path.name for path in directory.glob("cache-*.json"))
    return names, sum(path.stat().st_size for path in (directory / "packs").rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("folder", "ending"),
    [("jax", "kernel{}-cache"), ("triton", "A{}/k.cubin"), ("cuda", "{}/x"), ("inductor", "{}/k.py")],
)
def test_what_all_made_at_once_is_published_once(
    node: Callable[..., Node], tmp_path: Path, folder: str, ending: str
) -> None:
    """Of the same names, but other bytes and times, as pickles and libraries have."""
    chance = random.Random(1)
    nodes = [node(f"node{number}") for number in range(NODES)]
    for each in nodes:
        assert each.seed().is_cold
        for number in range(FILES):
            each.write(f"{folder}/{ending.format(number)}", chance.randbytes(FILE_BYTES), age_s=chance.random())
    done = at_once(nodes)
    assert sorted(each.generation for each in done) == [0] * (NODES - 1) + [1], [each.line for each in done]
    names, packs = stored(tmp_path)
    assert names == ["cache-000001.json"]
    assert packs < 1.5 * FILES * FILE_BYTES
    assert _Counted.written < 2 * FILES * FILE_BYTES
    last = node("last")
    assert last.seed().files == FILES


def test_what_each_made_of_its_own_is_all_kept(node: Callable[..., Node]) -> None:
    chance = random.Random(2)
    nodes = [node(f"node{number}") for number in range(NODES)]
    for number, each in enumerate(nodes):
        each.seed()
        each.write("jax/same-cache", chance.randbytes(FILE_BYTES))
        each.write(f"jax/own{number}-cache", chance.randbytes(FILE_BYTES))
    done = at_once(nodes)
    assert sorted(each.generation for each in done) == list(range(1, NODES + 1)), [each.line for each in done]
    assert node("last").seed().files == NODES + 1


def test_what_was_there_and_of_no_use_is_replaced(node: Callable[..., Node]) -> None:
    first, second, third = node("a"), node("b"), node("c")
    first.write("jax/kernel-cache", b"of no use", age_s=1)
    assert first.capture().generation == 1
    assert second.seed().files == 1
    second.write("jax/kernel-cache", b"made again", age_s=-5)
    assert second.capture().generation == 2
    third.seed()
    assert third.files() == {"jax/kernel-cache": b"made again"}


def test_a_dead_or_slow_publisher_is_waited_for_with_a_bound(node: Callable[..., Node], tmp_path: Path) -> None:
    store = open_store(f"{tmp_path}/store/caches/{KEY}")
    taken = aio.run_sync(BuilderLease(store, owner="another node").try_take(KEY))
    assert isinstance(taken, Lease)
    slow = node("a", wait_s=0.5)
    slow.write("jax/kernel-cache")
    began_s = time.monotonic()
    assert slow.capture().generation == 1
    assert 0.5 <= time.monotonic() - began_s < 10
    again = aio.run_sync(BuilderLease(store, owner="third").try_take(KEY))
    assert isinstance(again, LeaseHolder) and again.owner == "another node", "it was not taken from who has it"
    aio.run_sync(store.aclose())


def test_leases_are_given_back(node: Callable[..., Node], tmp_path: Path) -> None:
    each = node("a")
    for number in range(3):
        each.write(f"jax/{number}-cache", os.urandom(9))
        assert each.capture().generation == number + 1
    directory = tmp_path / "store" / "caches" / KEY / "keys" / KEY
    assert [path.name for path in directory.iterdir()] == ["lease-000003.json"]
