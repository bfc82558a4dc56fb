"""The block cache among processes: each block is fetched once; kills and full disks never give a wrong byte."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bootseer import aio
from bootseer.blocks.cache import Cache, open_cache
from bootseer.blocks.fetch import BlockFetcher
from bootseer.cache_folder import Limit
from bootseer.storage import open_store
from tests.support import Program, Programs, lacking, python, wait_until
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind
from tests.unit.bootseer.blocks.trees import Tree, assert_right, make_tree, open_root

# Reads all blocks in an order of its own and checks each; a line when it begins and one of figures at the end.
READER = """
import asyncio, hashlib, json, os, random, sys, time
from bootseer.blocks.cache import open_cache
from bootseer.blocks.fetch import BlockFetcher
from bootseer.storage import open_store
from bootseer.tree import index as tree_index

job = json.loads(sys.argv[1])

async def main():
    with open(job["index"], "rb") as file:
        index = tree_index.decode(file.read(), job["tree"], job["index"])
    root = open_cache(os.environ)
    store = open_store(job["url"])
    with root.open_tree(job["tree"], index.block_count) as cache:
        fetcher = BlockFetcher(index, cache, [store], max_gap_bytes=0)
        order = list(range(index.block_count))
        random.Random(job["seed"]).shuffle(order)
        numbers = iter(order)
        slowest_s = 0.0

        async def read():
            nonlocal slowest_s
            for number in numbers:
                begin_s = time.monotonic()
                raws = await fetcher.read_now([number])
                slowest_s = max(slowest_s, time.monotonic() - begin_s)
                assert hashlib.sha256(raws[number]).hexdigest() == job["raws"][number], number

        print("begin", flush=True)
        async with asyncio.TaskGroup() as group:
            for _ in range(job["width"]):
                group.create_task(read())
        await fetcher.aclose()
        print(json.dumps({**fetcher.statistics(), **cache.statistics(), "slowest_s": slowest_s}), flush=True)
    await store.aclose()

asyncio.run(main())
"""


class Job(NamedTuple):
    """A tree at a server, and a cache that readers share."""

    tree: Tree
    server: FaultyHttpServer
    folder: Path
    programs: Programs

    def start(self, seed: int, *, width: int = 3) -> Program:
        job = {
            "tree": self.tree.digest,
            "index": os.fspath(self.folder / "index"),
            "url": self.server.url,
            "raws": [hashlib.sha256(raw).hexdigest() for raw in self.tree.raws],
            "seed": seed,
            "width": width,
        }
        environ = {"BOOTSEER_CACHE": os.fspath(self.folder / "cache"), "BOOTSEER_CACHE_LIMIT": "100%"}
        return self.programs.start(*python(os.fspath(self.folder / "reader.py")), json.dumps(job), env=environ)

    def served_bytes(self) -> int:
        return sum(self.server.served_bytes.values())


@pytest.fixture
def job(tmp_path: Path, program: Programs) -> Iterator[Job]:
    tree = make_tree(160, pack_bytes=2 << 20)
    (tmp_path / "reader.py").write_text(READER)
    (tmp_path / "index").write_bytes(tree.data)
    with FaultyHttpServer(tree.packs) as server:
        yield Job(tree, server, tmp_path, program)
    aio.close()


def figures(program: Program) -> dict[str, Any]:
    done = program.wait(60.0)
    assert done.status == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


# ---- one fetch a block -----------------------------------------------------------------------------------------


def test_processes_that_want_all_blocks_fetch_each_once(job: Job) -> None:
    found = [figures(reader) for reader in [job.start(seed) for seed in range(4)]]
    assert job.served_bytes() == job.tree.index.stored_bytes
    assert sum(each["demand_blocks"] for each in found) == job.tree.count
    assert all(each["present"] == job.tree.count and not each["damaged"] for each in found)
    again = figures(job.start(9))
    assert (again["requests"], again["waits"]) == (0, job.tree.count)
    assert job.served_bytes() == job.tree.index.stored_bytes


def test_a_reader_that_comes_late_takes_what_is_there(job: Job) -> None:
    job.server.rate = 20e6
    first = job.start(1)
    wait_until(lambda: job.served_bytes() > job.tree.index.stored_bytes // 4, 30.0)
    second = figures(job.start(2))
    assert figures(first)["demand_blocks"] + second["demand_blocks"] == job.tree.count
    assert job.served_bytes() == job.tree.index.stored_bytes


# ---- kills -----------------------------------------------------------------------------------------------------


def test_kills_at_any_moment_leave_nothing_wrong_and_nobody_waiting(job: Job) -> None:
    """Readers come and are killed while others go on; whatever they left, the others read right bytes."""
    chance = random.Random(5)
    job.server.rate = 0.5e6  # of each answer: slow enough that all of them come before the end
    survivor = job.start(0, width=2)
    killed = 0
    for seed in range(1, 7):
        victim = job.start(seed, width=6)
        before = job.served_bytes()
        wait_until(lambda victim=victim: "begin" in victim.stdout, 20.0)
        goal = before + chance.randrange(512 << 10)
        wait_until(
            lambda goal=goal, victim=victim: job.served_bytes() >= goal or victim.process.poll() is not None, 20.0
        )
        if victim.process.poll() is None:
            victim.signal(signal.SIGKILL)
            killed += 1
        assert victim.process.wait(10.0) in (0, -signal.SIGKILL), victim.stderr
    assert killed >= 3
    job.server.rate = None
    figures(survivor)
    last = figures(job.start(99))
    assert last["present"] == job.tree.count
    assert last["damaged"] == 0
    # What was on its way to those who were killed is lost, and no more.
    assert job.served_bytes() <= job.tree.index.stored_bytes + killed * 6 * (128 << 10)


def test_a_block_whose_fetcher_was_killed_is_fetched_by_who_waits_for_it(job: Job) -> None:
    job.server.plan = [HttpFault(HttpKind.SILENCE, requests=range(2))]
    victim = job.start(3, width=2)
    wait_until(lambda: job.server.count() == 2, 20.0)  # it holds the locks of two blocks
    waiter = job.start(3, width=2)
    wait_until(lambda: "begin" in waiter.stdout, 20.0)
    victim.signal(signal.SIGKILL)
    victim.process.wait(10.0)
    assert figures(waiter)["slowest_s"] < 4.0  # not the patience with one who lives


def test_a_block_whose_fetcher_was_stopped_comes_another_way(job: Job) -> None:
    job.server.plan = [HttpFault(HttpKind.SILENCE, requests=range(2))]
    stopped = job.start(3, width=2)
    wait_until(lambda: job.server.count() == 2, 20.0)
    stopped.signal(signal.SIGSTOP)
    try:
        found = figures(job.start(3, width=2))
        assert 4.0 < found["slowest_s"] < 12.0
    finally:
        stopped.signal(signal.SIGKILL)
        stopped.process.wait(10.0)


# ---- disks -----------------------------------------------------------------------------------------------------


class Disk(NamedTuple):
    """A small file system."""

    path: Path

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", os.fspath(self.path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "bootseer", os.fspath(path)]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        lacking(f"mounting a small file system needs root: {done.stderr.decode().strip()}")
    yield Disk(path)
    wait_until(lambda: not subprocess.run(["umount", os.fspath(path)], capture_output=True).returncode)


SMALL = make_tree(60)


def read_all(root: Cache, *, turns: int = 1) -> tuple[dict[str, float], int]:
    """Reads all of SMALL, `turns` times; figures of the cache, and the bytes that were served."""
    with FaultyHttpServer(SMALL.packs) as server:

        async def main() -> dict[str, float]:
            store = open_store(server.url)
            with root.open_tree(SMALL.digest, SMALL.count) as cache:
                fetcher = BlockFetcher(SMALL.index, cache, [store], max_gap_bytes=0)
                for _ in range(turns):
                    for number in range(SMALL.count):
                        assert_right(await fetcher.read_now([number]), SMALL)
                await fetcher.aclose()
                kept = set(range(SMALL.count)) - set(cache.missing(range(SMALL.count)))
                for number in kept:
                    assert cache.try_read_block(number, len(SMALL.raws[number])) == SMALL.raws[number]
                statistics = cache.statistics()
            await store.aclose()
            return {**fetcher.statistics(), **statistics}

        found = asyncio.run(main())
        aio.close()
        return found, sum(server.served_bytes.values())


@pytest.mark.system
def test_a_full_disk_costs_fetches_only(disk: Disk, said: list[str]) -> None:
    root = open_root(disk.path)
    found, served = read_all(root, turns=2)
    assert served == SMALL.index.stored_bytes  # the rest stayed in memory
    assert 5 < found["present"] < SMALL.count
    assert found["refused"] > 0
    assert len(said) == 1
    assert "No space left" in said[0] or "limit" in said[0]
    disk.remount("size=32m")
    found, served = read_all(root)
    assert found["present"] == SMALL.count
    assert served < SMALL.index.stored_bytes


@pytest.mark.system
def test_on_a_full_disk_trees_that_nobody_uses_make_room(disk: Disk) -> None:
    disk.remount("size=9m")
    root = Cache(os.fspath(disk.path / "cache"), limit=Limit(share=1.0))
    other = make_tree(30, source="older")
    with root.open_tree(other.digest, other.count) as cache:
        for number, raw in enumerate(other.raws):
            assert cache.fill(number, raw)
    (disk.path / "other user").write_bytes(bytes(3 << 20))
    found, _ = read_all(root)
    assert [tree.digest for tree in root.trees()] == [SMALL.digest]
    assert found["present"] > 20


@pytest.mark.system
def test_a_disk_without_any_room_is_no_error(disk: Disk, said: list[str]) -> None:
    root = open_root(disk.path)
    with pytest.raises(OSError), open(disk.path / "filler", "wb") as filler:
        while True:
            filler.write(bytes(4096))
    found, served = read_all(root, turns=2)
    assert (found["present"], served) == (0, SMALL.index.stored_bytes)
    assert len(said) == 1
    assert "not cached" in said[0]


@pytest.mark.system
def test_a_disk_that_became_read_only_is_no_error(disk: Disk) -> None:
    disk.remount("size=32m")
    root = open_root(disk.path)
    assert read_all(root)[0]["present"] == SMALL.count
    root.collect(0)
    disk.remount("ro")
    found, served = read_all(root)
    assert (found["present"], served) == (0, SMALL.index.stored_bytes)
    disk.remount("rw")


# ---- a power cut -----------------------------------------------------------------------------------------------


def test_a_cache_outlives_boots_as_far_as_it_was_saved(tmp_path: Path) -> None:
    found, served = read_all(open_root(tmp_path, boot_id="boot-1"))
    assert (found["present"], served) == (SMALL.count, SMALL.index.stored_bytes)
    begin_s = time.monotonic()
    found, served = read_all(open_root(tmp_path, boot_id="boot-2"))
    assert (found["present"], served) == (SMALL.count, 0)  # saved when it was closed
    assert time.monotonic() - begin_s < 20.0
    (tmp_path / "cache" / "trees" / SMALL.digest / "saved").unlink()
    found, served = read_all(open_root(tmp_path, boot_id="boot-3"))
    assert served == SMALL.index.stored_bytes


def test_the_cache_of_this_user_is_made_where_variables_say(tmp_path: Path) -> None:
    root = open_cache({"BOOTSEER_CACHE": os.fspath(tmp_path / "mine"), "BOOTSEER_CACHE_LIMIT": "1GiB"})
    assert read_all(root)[0]["present"] == SMALL.count
    assert os.stat(tmp_path / "mine").st_mode & 0o077 == 0
