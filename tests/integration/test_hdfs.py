"""HDFS on a real NameNode and three DataNodes: the suite of all stores by each client, and what only HDFS has."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from bootseer.errors import (
    AlreadyExists,
    PermissionDenied,
    SourceChanged,
    StorageError,
    Truncated,
    Unavailable,
)
from bootseer.storage import Store, open_store
from bootseer.storage.hdfs.store import HdfsStore
from tests.integration import hdfs_cluster
from tests.integration.hdfs_cluster import DIRECTORY
from tests.leaks import LeakCheck
from tests.support import wait_threads_back, wait_until
from tests.testing import store_suite
from tests.testing.minihdfs import MiniHdfs
from tests.testing.store_suite import MakeStore, ReadingSuite, StoreSuite, pattern, runs

MIB = 1 << 20
DATA = os.urandom(3 * MIB + 123)
roots = itertools.count()


@pytest.fixture(autouse=True)
def settled(leaks: LeakCheck) -> Iterator[None]:
    yield
    wait_threads_back()
    hdfs_cluster.forgive_native(leaks)


WRITING = re.compile("create|publish_|concat|written|error|cancel|taken")
NOT_OF_WRITING = [
    name
    for name in (*vars(ReadingSuite), *vars(StoreSuite))
    if name.startswith("test_") and (name in vars(ReadingSuite) or not WRITING.search(name))
]


class HdfsSuite(StoreSuite):
    refused = ":"

    @pytest.fixture
    def make_store(self, hdfs: MiniHdfs, monkeypatch: pytest.MonkeyPatch) -> MakeStore:
        names = [name for name in store_suite.NAMES if not any(char in name for char in self.refused)]
        monkeypatch.setattr(store_suite, "NAMES", names)
        number = next(roots)
        return lambda: self.open(hdfs, f"suite{number}")

    def open(self, hdfs: MiniHdfs, root: str) -> Store:
        raise NotImplementedError


class NativeSuite(HdfsSuite):
    @runs()
    async def test_a_version_is_never_taken_for_another(self, store: Store) -> None:
        """A file that is open stays what it was, and is not asked for again; else it is noticed."""
        first, second = pattern(200_000, seed=1), pattern(200_000, seed=2)
        await store.publish("open.bin", first)
        await store.publish("other.bin", first)
        before = (await store.stat("open.bin")).etag
        other = (await store.stat("other.bin")).etag
        assert await store_suite.read(store, "open.bin", 0, 10, etag=before) == first[:10]
        for name in ("open.bin", "other.bin"):
            await store.publish(name, second)
        assert await store_suite.read(store, "open.bin", 10, 150_000, etag=before) == first[10:150_010]
        for attempt in (0, 1):
            with pytest.raises(SourceChanged):
                await store_suite.read(store, "other.bin", 0, 10, etag=other, attempt=attempt)
        with pytest.raises(SourceChanged):
            await store_suite.read(store, "open.bin", 0, 10, etag=before, attempt=1)
        now = (await store.stat("open.bin")).etag
        assert now != before
        assert await store_suite.read(store, "open.bin", 0, 200_000, etag=now) == second
        assert await store_suite.read(store, "open.bin", 0, 200_000) == second


class TestHdfs(NativeSuite):
    def open(self, hdfs: MiniHdfs, root: str) -> Store:
        return open_store(f"{hdfs.url}/{root}", options={"web": hdfs_cluster.web_of(hdfs)})


class TestHdfsWithoutWebHdfs(NativeSuite):
    """Only what it does otherwise than TestHdfs: writing."""

    locals().update(dict.fromkeys(NOT_OF_WRITING))

    def open(self, hdfs: MiniHdfs, root: str) -> Store:
        return open_store(f"{hdfs.url}/{root}", options={"web": ""})


class TestWebHdfs(HdfsSuite):
    refused = ":%"  # the DataNodes of this fixture decode the path twice

    def open(self, hdfs: MiniHdfs, root: str) -> Store:
        return open_store(f"{hdfs.web_url}/{root}")


def test_all_ways_lead_to_the_same_bytes(hdfs: MiniHdfs) -> None:
    """The open file, WebHDFS at one replica, a new open, WebHDFS at the other one."""

    async def check() -> None:
        place = hdfs_cluster.store(hdfs)
        status = await place.publish("ways", DATA)
        before = sum(node.is_running() for node in hdfs.datanodes)
        for attempt in range(6):
            target = bytearray(len(DATA) - 7)
            await place.read_into("ways", 7, memoryview(target), etag=status.etag, attempt=attempt)
            assert target == DATA[7:]
        assert before == len(hdfs.datanodes)

    hdfs_cluster.run(check())


def test_a_range_past_the_end_is_an_error_and_no_panic(hdfs: MiniHdfs) -> None:
    async def check() -> None:
        place = hdfs_cluster.store(hdfs)
        await place.publish("short", b"12345")
        for attempt in (0, 1, 2):
            with pytest.raises(Truncated, match="has 5 bytes, fewer than 6"):
                await place.read_into("short", 1, memoryview(bytearray(5)), attempt=attempt)

    hdfs_cluster.run(check())


def test_placement_spreads_files_over_datanodes(hdfs: MiniHdfs) -> None:
    async def write() -> None:
        place = hdfs_cluster.store(hdfs, replication=1, block_bytes=MIB)
        for number in range(3):
            async with place.create(f"placed{number}", size=len(DATA), placement=number) as writer:
                await writer.write(DATA)

    hdfs_cluster.run(write())
    nodes = set()
    for number in range(3):
        blocks = hdfs.blocks(f"{DIRECTORY}/placed{number}")
        assert len(blocks) == 4
        (one,) = {block.addresses for block in blocks}  # all of a file's blocks are on one DataNode
        nodes.add(one)
    assert len(nodes) == 3


def test_parts_of_a_file_are_spread_evenly(hdfs: MiniHdfs) -> None:
    """Also of several files that are written at once, of which each begins on another DataNode."""

    async def write() -> None:
        place = hdfs_cluster.store(hdfs, replication=1, part_bytes=65536)
        for number in range(8):
            async with place.create(f"rows{number}", size=4 * 65536, placement=number) as writer:
                await writer.write(bytes(4 * 65536))

    hdfs_cluster.run(write())
    homes = Counter(block.addresses for number in range(8) for block in hdfs.blocks(f"{DIRECTORY}/rows{number}"))
    assert sorted(homes.values()) == [10, 11, 11]


def test_many_parts_become_one_file(hdfs: MiniHdfs) -> None:
    """More parts than one request joins; what is smaller than a part, and the end, go with it."""
    data = os.urandom(20 * 65536 + 5)

    async def write() -> None:
        place = hdfs_cluster.store(hdfs, part_bytes=65536)
        async with place.create("parts", placement=1) as writer:
            await writer.write(data[:10])
            await writer.write(memoryview(data)[10:300_000])
            await writer.write(memoryview(data)[300_000:])
        target = bytearray(len(data))
        await place.read_into("parts", 0, memoryview(target))
        assert target == data

    hdfs_cluster.run(write())
    assert len(hdfs.blocks(f"{DIRECTORY}/parts")) == 21
    assert hdfs_cluster.hidden_names(hdfs) == []


def test_parts_of_another_directory_are_not_joined(hdfs: MiniHdfs) -> None:
    async def check() -> None:
        place = hdfs_cluster.store(hdfs)
        await place.publish("here/a", b"a")
        await place.publish("there/b", b"b")
        with pytest.raises(StorageError, match="joins only files of one directory"):
            await place.concat("here/ab", ["here/a", "there/b"])
        assert [entry.name for entry in await place.list("here")] == ["a"]

    hdfs_cluster.run(check())


def test_replication_and_block_size_are_as_asked(hdfs: MiniHdfs) -> None:
    async def write(**options: object) -> None:
        place = hdfs_cluster.store(hdfs, replication=3, block_bytes=MIB, **options)
        await place.publish("options" + str(len(options)), DATA)

    hdfs_cluster.run(write())
    hdfs_cluster.run(write(web=""))
    for name in ("options0", "options1"):
        path = f"{DIRECTORY}/{name}"
        assert [block.length for block in hdfs.blocks(path)] == [MIB, MIB, MIB, 123]

        def replicas(path: str = path) -> set[int]:
            return {len(block.addresses) for block in hdfs.blocks(path)}

        # A file is closed once the NameNode knows of one replica of each block; DataNodes report the others later.
        wait_until(lambda: replicas() == {3}, 30, "three replicas")


def test_configuration_of_hadoop_is_honoured(hdfs: MiniHdfs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HADOOP_CONF_DIR", hdfs.conf_folder)

    async def check() -> None:
        place = HdfsStore.open(f"hdfs://{DIRECTORY}/conf")
        assert place.url == f"{hdfs.url}{DIRECTORY}/conf"
        assert place.features.concatenates
        await place.publish("a", b"12")
        await place.publish("b", b"3")
        await place.concat("ab", ["a", "b"])
        assert (await place.stat("ab")).size == 3

    hdfs_cluster.run(check())


@pytest.mark.parametrize("kind", ["hdfs", "hdfs without WebHDFS", "webhdfs"])
def test_no_permission(hdfs: MiniHdfs, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The folder is the superuser's."""
    hdfs_cluster.run(hdfs_cluster.store(hdfs).publish("mine/file", b"mine"))
    monkeypatch.setenv("HADOOP_USER_NAME", "mallory")

    async def check() -> None:
        if kind == "webhdfs":
            place = HdfsStore.open(hdfs.web_url + DIRECTORY)
        else:
            place = hdfs_cluster.store(hdfs, **({"web": ""} if "without" in kind else {}))
        with pytest.raises(PermissionDenied, match="mallory"):
            await place.publish("mine/other", b"theirs")
        with pytest.raises(PermissionDenied, match="mallory"):
            await place.delete("mine")
        target = bytearray(4)
        await place.read_into("mine/file", 0, memoryview(target))
        assert target == b"mine"

    hdfs_cluster.run(check())


# A program, as the calls hang for good: they must not keep it from ending either.
ASKING_NOBODY = """
import asyncio, sys
from bootseer.errors import StorageTimeout
from bootseer.storage.hdfs.store import HdfsStore

async def ask(place):
    target = memoryview(bytearray(10))
    calls = place.stat("file"), place.list(""), place.read_into("file", 0, target), place.publish("file", b"x")
    for call in calls:
        try:
            await call
        except StorageTimeout as error:
            assert "127.0.0.1" in str(error), error
            print("timeout")

asyncio.run(ask(HdfsStore.open(sys.argv[1], timeout_s=0.5, options={"web": ""} if sys.argv[1][0] == "h" else {})))
"""


@pytest.mark.parametrize("scheme", ["hdfs", "webhdfs"])
def test_no_namenode_is_a_timeout(hdfs: MiniHdfs, free_port: int, scheme: str) -> None:
    argv = [sys.executable, "-c", ASKING_NOBODY, f"{scheme}://127.0.0.1:{free_port}/x"]
    # Far more than four times the half second, for a busy machine, and far less than the minute of the default.
    done = subprocess.run(argv, capture_output=True, text=True, timeout=50)
    assert done.stderr == ""
    assert done.stdout.split() == ["timeout"] * 4


# A program, as a process with threads should not fork a test run.
FORKING = """
import asyncio, os, sys
from bootseer.storage.hdfs.store import HdfsStore
url, web = sys.argv[1:]

async def read(place):
    target = bytearray(5)
    await place.read_into("forked", 0, memoryview(target), etag=(await place.stat("forked")).etag)
    return bytes(target)

place = HdfsStore.open(url, timeout_s=10.0, options={"web": web})
asyncio.run(place.publish("forked", b"12345"))
assert asyncio.run(read(place)) == b"12345"
pid = os.fork()
if not pid:
    status = 1
    try:
        status = 0 if asyncio.run(read(place)) == b"12345" else 2
    finally:
        os._exit(status)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), asyncio.run(read(place)).decode())
"""


def test_it_works_in_the_child_of_a_fork(hdfs: MiniHdfs) -> None:
    argv = [sys.executable, "-W", "ignore", "-c", FORKING, hdfs.url + DIRECTORY, hdfs_cluster.web_of(hdfs)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 12345\n", done.stderr


def test_one_of_two_writers_wins_and_the_other_leaves_nothing(hdfs: MiniHdfs) -> None:
    async def write(letter: bytes) -> bool:
        place = hdfs_cluster.store(hdfs)
        try:
            async with place.create("race/won") as writer:
                await writer.write(letter * MIB)
        except AlreadyExists:
            return False
        return True

    async def race() -> None:
        won = await asyncio.gather(*(write(letter) for letter in (b"a", b"b", b"c")))
        assert sum(won) == 1
        place = hdfs_cluster.store(hdfs)
        target = bytearray(MIB)
        await place.read_into("race/won", 0, memoryview(target))
        assert set(target) == {b"abc"[won.index(True)]}
        assert [entry.name for entry in await place.list("race")] == ["won"]

    hdfs_cluster.run(race())


def test_small_files_go_another_way_when_the_native_client_fails(
    hdfs: MiniHdfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object, **__: object) -> None:
        raise Unavailable("a pipeline broke")

    async def check() -> None:
        place = hdfs_cluster.store(hdfs)
        assert place.native is not None
        monkeypatch.setattr(place.native, "close", refuse)
        await place.publish("small/file", b"123")
        assert place.statistics()["retries"] >= 1
        target = bytearray(3)
        await place.read_into("small/file", 0, memoryview(target))
        assert target == b"123"
        assert [entry.name for entry in await place.list("small")] == ["file"]
        await place.aclose()

    hdfs_cluster.run(check())


def test_counts(hdfs: MiniHdfs) -> None:
    async def check() -> dict[str, int]:
        place = hdfs_cluster.store(hdfs)
        await place.publish("counted", DATA)
        await place.read_into("counted", 0, memoryview(bytearray(len(DATA))))
        return place.statistics()

    counts = hdfs_cluster.run(check())
    assert counts["read_bytes"] == len(DATA)
    assert counts["written_bytes"] == len(DATA)
    assert counts["retries"] == counts["reroutes"] == 0
    assert counts["requests"] > 3
