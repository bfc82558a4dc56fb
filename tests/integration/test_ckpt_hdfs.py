"""Striped versions and joined plain files on a real HDFS: balanced, right, also when servers fail meanwhile."""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from bootseer import aio
from bootseer.checkpoint.convert import stripe, unstripe
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.versions.resolve import Pinned, list_versions, resolve
from bootseer.checkpoint.versions.verify import verify
from bootseer.checkpoint.versions.version_input import inputs_of
from bootseer.checkpoint.writing.writer import Geometry, write_plain, write_version
from bootseer.storage.hdfs.store import HdfsStore
from tests.integration import hdfs_cluster
from tests.integration.hdfs_cluster import DIRECTORY
from tests.leaks import LeakCheck
from tests.support import wait_threads_back
from tests.testing.minihdfs import MiniHdfs

pytestmark = pytest.mark.slow

MIB = 1 << 20

UNIT_BYTES = 4 * MIB  # as the cluster's blocks
LIMIT_S = 60.0  # for a save while a server fails


@functools.cache
def payload() -> bytes:
    return os.urandom(72 * MIB + 5)


@pytest.fixture(autouse=True)
def settled(leaks: LeakCheck) -> Iterator[None]:
    yield
    wait_threads_back()
    hdfs_cluster.forgive_native(leaks)


def using(hdfs: MiniHdfs, work: Callable[[HdfsStore], Coroutine[Any, Any, Any]], **options: object) -> Any:
    async def run() -> Any:
        store = hdfs_cluster.store(hdfs, **options)
        try:
            return await work(store)
        finally:
            await store.aclose()

    return aio.run_sync(run())


async def is_right(store: HdfsStore, path: str) -> bool:
    """Every byte of the newest version, by its sums and by comparing."""
    pinned = await resolve(store, path)
    if (await verify(store, pinned)).faults:
        return False
    [(_, file)] = inputs_of(store, pinned)
    data = bytearray(file.size)
    await file.read_into(0, memoryview(data))
    return data == payload()


async def save(store: HdfsStore, path: str, disturb: Callable[[], object] = lambda: None) -> float:
    """Writes a version of it; `disturb` is called when some of it is written. Returns seconds."""
    is_disturbed = False

    def note(_: int) -> None:
        nonlocal is_disturbed
        if not is_disturbed:
            is_disturbed = True
            disturb()

    source = ("model.bin", MemoryInput([payload()]))
    began_s = time.monotonic()
    await write_version(store, path, [source], geometry=Geometry(UNIT_BYTES, 8), progress=note)
    assert is_disturbed
    return time.monotonic() - began_s


def test_stripes_are_spread_over_the_datanodes(hdfs: MiniHdfs) -> None:
    async def work(store: HdfsStore) -> Pinned:
        await save(store, "spread")
        assert await is_right(store, "spread")
        return await resolve(store, "spread")

    pinned = using(hdfs, work, replication=1)
    [file] = pinned.files
    homes: Counter[str] = Counter()
    for name in file.stripes:
        [home] = {block.addresses for block in hdfs.blocks(f"{DIRECTORY}/{name}")}
        homes.update(home)
    assert sorted(homes.values()) == [2, 3, 3]


def test_a_plain_file_in_parts_is_one_file(hdfs: MiniHdfs) -> None:
    async def work(store: HdfsStore) -> None:
        await write_plain(store, "plain/all.bin", MemoryInput([payload()]), parts=8)
        data = bytearray((await store.stat("plain/all.bin")).size)
        await store.read_into("plain/all.bin", 0, memoryview(data))
        assert data == payload()
        assert [entry.name for entry in await store.list("plain")] == ["all.bin"]

    using(hdfs, work)


def test_there_and_back_by_url(hdfs: MiniHdfs, tmp_path: Any) -> None:
    (tmp_path / "model.bin").write_bytes(payload())
    url = f"{hdfs.url}{DIRECTORY}/byurl"
    options = {"web": hdfs_cluster.web_of(hdfs), "replication": 1}
    for _ in range(2):
        done = stripe(str(tmp_path / "model.bin"), url, keep=1, options=options)
    versions = using(hdfs, lambda store: list_versions(store, "byurl"))
    assert [found.version for found in versions] == [done.version]
    assert unstripe(url, str(tmp_path / "back")).size == len(payload())
    assert (tmp_path / "back" / "model.bin").read_bytes() == payload()


def test_a_datanode_freezes_while_a_version_is_written(hdfs: MiniHdfs) -> None:
    node = hdfs.datanodes[1]
    try:
        took_s = using(hdfs, lambda store: save(store, "frozen-save", node.freeze), replication=2)
        assert using(hdfs, lambda store: is_right(store, "frozen-save"))
    finally:
        node.thaw()
    assert took_s < LIMIT_S


def test_servers_die_while_versions_are_written(tmp_path: os.PathLike[str]) -> None:
    with hdfs_cluster.start(tmp_path, block_bytes=UNIT_BYTES) as hdfs:
        node = hdfs.datanodes[1]
        assert using(hdfs, lambda store: save(store, "killed", node.kill), replication=2) < LIMIT_S
        assert using(hdfs, lambda store: is_right(store, "killed"))
        hdfs.restart(node)
        assert using(hdfs, lambda store: save(store, "restarted", hdfs.restart_namenode), replication=2) < LIMIT_S
        assert using(hdfs, lambda store: is_right(store, "restarted"))
