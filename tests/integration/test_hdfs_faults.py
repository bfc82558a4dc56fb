"""A real HDFS in trouble: DataNodes killed, frozen, slow, with damaged disks; the NameNode restarted or gone.

The NameNode calls a DataNode stale after 30 s, as it does by default, so all of this happens before it knows.
Reads end right within LATE_S of what they take undisturbed; writes end right within LIMIT_S, are never seen half,
and leave nothing behind. Threads that hung are back afterwards.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from bootseer.errors import BootseerError, StorageTimeout, Unavailable
from bootseer.storage.hdfs.store import HdfsStore
from tests.integration import hdfs_cluster
from tests.integration.hdfs_cluster import DIRECTORY
from tests.leaks import LeakCheck
from tests.support import wait_threads_back
from tests.testing.minihdfs import DataNode, MiniHdfs

pytestmark = pytest.mark.slow

# HDFS's own client waits 60 s. On a busy machine DataNodes that are well stall, too, 1.5 s each.
LATE_S = 10.0
LIMIT_S = 40.0  # for writes: the timeout of the store, and one more try of a part
BLOCK_BYTES = 4 << 20  # of the shared cluster as well


@functools.cache
def payload() -> bytes:
    return os.urandom(32 << 20)


@pytest.fixture(scope="module")
def usual_s(hdfs: MiniHdfs) -> float:
    """Seconds that reading payload() takes undisturbed; it is there as `data`, on other DataNodes as `more`."""

    async def measure() -> float:
        place = hdfs_cluster.store(hdfs)
        for placement, name in enumerate(("data", "more")):
            async with place.create(name, size=len(payload()), placement=placement) as writer:
                await writer.write(payload())
        seconds = (await hdfs_cluster.read(place, "data", payload())).seconds
        await place.aclose()
        return seconds

    return hdfs_cluster.run(measure())


@pytest.fixture(autouse=True)
def settled(request: pytest.FixtureRequest, leaks: LeakCheck) -> Iterator[None]:
    """After each test all threads that hung are back."""
    yield
    wait_threads_back()
    hdfs_cluster.forgive_native(leaks)


def test_frozen_datanode_delays_no_read(hdfs: MiniHdfs, usual_s: float) -> None:
    node = hdfs_cluster.sandbox(hdfs, "data")
    try:
        found = hdfs_cluster.run(
            hdfs_cluster.read(hdfs_cluster.store(hdfs), "data", payload(), disturb=node.freeze)
        )
    finally:
        node.thaw()
    assert (found.is_right, found.error) == (True, None)
    assert found.seconds < usual_s + LATE_S


def test_datanode_that_is_frozen_already_delays_no_read_and_is_avoided_then(
    hdfs: MiniHdfs, usual_s: float
) -> None:
    async def read_twice() -> list[hdfs_cluster.Read]:
        place = hdfs_cluster.store(hdfs)
        return [await hdfs_cluster.read(place, name, payload()) for name in ("data", "more")]

    node = hdfs_cluster.sandbox(hdfs, "data")
    node.freeze()
    try:
        first, second = hdfs_cluster.run(read_twice())
    finally:
        node.thaw()
    assert (first.is_right, first.error) == (True, None)
    assert (second.is_right, second.error) == (True, None)
    assert first.seconds < usual_s + LATE_S
    assert second.seconds < usual_s + LATE_S


def test_slow_datanode_delays_no_read(hdfs: MiniHdfs, usual_s: float) -> None:
    for node in hdfs.datanodes:
        with node.slowed():
            found = hdfs_cluster.run(hdfs_cluster.read(hdfs_cluster.store(hdfs), "data", payload()))
        assert (found.is_right, found.error) == (True, None)
        assert found.seconds < usual_s + LATE_S


def test_damaged_replica_is_not_read(hdfs: MiniHdfs, usual_s: float) -> None:
    async def write() -> None:
        async with hdfs_cluster.store(hdfs).create("damaged", size=len(payload())) as writer:
            await writer.write(payload())

    hdfs_cluster.run(write())
    for block in range(0, len(hdfs.blocks(f"{DIRECTORY}/damaged")), 2):
        hdfs.corrupt(f"{DIRECTORY}/damaged", block=block, offset=BLOCK_BYTES // 2)
    found = hdfs_cluster.run(hdfs_cluster.read(hdfs_cluster.store(hdfs), "damaged", payload()))
    assert (found.is_right, found.error) == (True, None)
    assert found.seconds < usual_s + LATE_S


def test_block_without_a_good_replica_is_an_error(hdfs: MiniHdfs) -> None:
    async def read() -> bytearray:
        place = hdfs_cluster.store(hdfs)
        await place.publish("lost", payload()[: 1 << 20])
        hdfs.corrupt(f"{DIRECTORY}/lost", replicas=2, offset=1 << 19)
        target = bytearray(1 << 20)
        with pytest.raises(Unavailable, match=r"are unreachable or damaged|closed the connection|sent nothing"):
            await place.read_into("lost", 0, memoryview(target))
        return target

    target = hdfs_cluster.run(read())
    assert all(ours in (0, theirs) for ours, theirs in zip(target, payload(), strict=False))


def test_frozen_datanode_spoils_no_write(hdfs: MiniHdfs) -> None:
    node: DataNode | None = None

    def freeze() -> None:
        nonlocal node
        node = hdfs_cluster.writing_to(hdfs)
        node.freeze()

    try:
        seconds, error, seen = hdfs_cluster.run(
            hdfs_cluster.write(_store(hdfs), "frozen", payload(), disturb=freeze, placement=0)
        )
    finally:
        if node is not None:
            node.thaw()
    assert error is None
    assert seconds < LIMIT_S
    assert seen <= {len(payload())}
    _check_written(hdfs, "frozen")


def test_slow_datanode_spoils_no_write(hdfs: MiniHdfs) -> None:
    with hdfs.datanodes[1].slowed():
        seconds, error, seen = hdfs_cluster.run(
            hdfs_cluster.write(_store(hdfs), "slow", payload()[: 8 << 20], placement=1)
        )
    assert error is None
    assert seconds < LIMIT_S
    assert seen <= {8 << 20}
    _check_written(hdfs, "slow", payload()[: 8 << 20])


@pytest.mark.usefixtures("usual_s")  # `data` is there
def test_frozen_namenode_is_a_timeout(hdfs: MiniHdfs) -> None:
    async def ask() -> float:
        place = hdfs_cluster.store(hdfs, timeout_s=1.0)
        await place.stat("data")
        hdfs.freeze_namenode()
        began_s = time.monotonic()
        try:
            for call in (place.stat("data"), place.list(""), place.delete("nothing")):
                with pytest.raises(StorageTimeout, match="no answer within 1 s"):
                    await call
        finally:
            hdfs.thaw_namenode()
        return time.monotonic() - began_s

    assert hdfs_cluster.run(ask()) < 3 * 1.0 + 1.0


def test_killed_servers(tmp_path: os.PathLike[str], leaks: LeakCheck, usual_s: float) -> None:
    """Its own cluster, as servers are started again: the leak check must see them come and go."""
    with hdfs_cluster.start(tmp_path, block_bytes=BLOCK_BYTES) as hdfs:
        seconds, error, _ = hdfs_cluster.run(hdfs_cluster.write(_store(hdfs), "data", payload()))
        assert error is None

        node = hdfs_cluster.sandbox(hdfs, "data")
        found = hdfs_cluster.run(hdfs_cluster.read(hdfs_cluster.store(hdfs), "data", payload(), disturb=node.kill))
        assert (found.is_right, found.error) == (True, None)
        assert found.seconds < usual_s + LATE_S
        hdfs.restart(node)

        seconds, error, seen = hdfs_cluster.run(
            hdfs_cluster.write(_store(hdfs), "killed", payload(), disturb=_kill_soon(hdfs), placement=1)
        )
        assert error is None
        assert seconds < LIMIT_S
        assert seen <= {len(payload())}
        _check_written(hdfs, "killed")
        for node in hdfs.datanodes:
            if not node.is_running():
                hdfs.restart(node)

        _namenode_gone_and_back(hdfs, usual_s)
        wait_threads_back()
    hdfs_cluster.forgive_native(leaks)


def _kill_soon(hdfs: MiniHdfs) -> Callable[[], None]:
    """Kills the DataNode that has what was written so far, while the next part is on its way."""

    def kill() -> None:
        node = hdfs_cluster.writing_to(hdfs)
        threading.Timer(0.05, node.kill).start()

    return kill


def _store(hdfs: MiniHdfs) -> HdfsStore:
    """Writes in small parts, so that some are there when the trouble begins."""
    return hdfs_cluster.store(hdfs, part_bytes=len(payload()) // 4)


def _namenode_gone_and_back(hdfs: MiniHdfs, usual_s: float) -> None:
    """Asked for a name without a NameNode it is a timeout; what is open is read on, what is written waits."""
    restarting = threading.Thread(target=hdfs.start_namenode)

    async def go() -> tuple[hdfs_cluster.Read, tuple[float, BootseerError | None, set[int]]]:
        impatient = hdfs_cluster.store(hdfs, timeout_s=0.5)
        await impatient.stat("data")

        async def stop_it() -> None:
            hdfs.kill_namenode()
            began_s = time.monotonic()
            with pytest.raises(StorageTimeout):
                await impatient.stat("data")
            assert time.monotonic() - began_s < LATE_S
            restarting.start()

        async with asyncio.TaskGroup() as group:
            stopped: list[asyncio.Task[None]] = []
            reading = group.create_task(
                hdfs_cluster.read(
                    hdfs_cluster.store(hdfs),
                    "data",
                    payload(),
                    disturb=lambda: stopped.append(group.create_task(stop_it())),
                )
            )
            writing = group.create_task(hdfs_cluster.write(_store(hdfs), "restarted", payload()))
        return reading.result(), writing.result()

    found, (seconds, error, seen) = hdfs_cluster.run(go())
    restarting.join()
    assert (found.is_right, found.error) == (True, None)
    assert found.seconds < usual_s + LATE_S
    assert error is None
    assert seconds < LIMIT_S
    assert seen <= {len(payload())}
    _check_written(hdfs, "restarted")


def _check_written(hdfs: MiniHdfs, name: str, data: bytes = payload()) -> None:
    """It is there whole, and nothing else is."""

    async def check() -> None:
        place = hdfs_cluster.store(hdfs)
        assert (await hdfs_cluster.read(place, name, data)).is_right
        for found in await place.list(""):
            assert not found.name.startswith(".")
        await place.aclose()

    hdfs_cluster.run(check())
