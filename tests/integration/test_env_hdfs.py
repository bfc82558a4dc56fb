"""An environment store on HDFS, by hdfs-native and by WebHDFS alone: one builder, one snapshot, then collected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bootseer import aio
from bootseer.env.store.lease import BuilderLease, Lease, LeaseHolder, WaitResult, list_leases, renewing
from bootseer.env.store.store import EnvStore
from bootseer.storage import Store
from bootseer.storage.hdfs.store import HdfsStore
from tests.env_parts import ADA, ADAS, build_into, document, make_snapshot, write_environment
from tests.integration import hdfs_cluster
from tests.leaks import LeakCheck
from tests.support import wait_threads_back
from tests.testing.minihdfs import MiniHdfs

pytestmark = pytest.mark.slow
KEY, DOCUMENT = document()
BEAT_S = 0.5


@pytest.fixture(autouse=True)
def quiet(leaks: LeakCheck) -> Iterator[None]:
    yield
    wait_threads_back()
    hdfs_cluster.forgive_native(leaks)


@pytest.mark.parametrize("kind", ["native", "web"])
def test_one_builder_and_one_snapshot(hdfs: MiniHdfs, kind: str, tmp_path: Path) -> None:
    directory = f"{hdfs_cluster.DIRECTORY}/envs-{kind}"
    now_s = time.time()

    async def begin() -> Store:
        if kind == "web":
            return HdfsStore.open(hdfs.web_url + directory)
        return HdfsStore.open(hdfs.url + directory, options={"web": hdfs_cluster.web_of(hdfs)})

    stores = [aio.run_sync(begin()) for _ in range(4)]
    nodes = [EnvStore(store, store.url, ADAS) for store in stores]
    leases = [BuilderLease(store, owner=f"node{number}", beat_s=BEAT_S) for number, store in enumerate(stores)]

    async def take_all() -> list[Any]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each.try_take(KEY)) for each in leases]
        return [task.result() for task in tasks]

    try:
        taken = aio.run_sync(take_all())
        (lease,) = [each for each in taken if isinstance(each, Lease)]
        assert sum(isinstance(each, LeaseHolder) for each in taken) == 3
        builder = nodes[taken.index(lease)]
        with renewing(lease):
            built = build_into(builder, KEY, write_environment(tmp_path / "files"))
            snapshot = make_snapshot(
                KEY, built.digest, len(built.index_bytes), created_s=now_s, expires_s=now_s + 3600
            )

            async def publish_all() -> list[Any]:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(node.publish(snapshot, DOCUMENT, built.index_bytes, ADA))
                        for node in nodes
                    ]
                return [task.result() for task in tasks]

            published = aio.run_sync(publish_all())
        assert {each.found.generation for each in published} == {1}
        reader = nodes[(taken.index(lease) + 1) % 4]

        async def find() -> Any:
            return await reader.find(KEY, now_s)

        waited = aio.run_sync(leases[0].acquire(KEY, find, 30))
        assert isinstance(waited, WaitResult)
        assert aio.run_sync(reader.verify(waited.found)).faults == []
        # A holder that says nothing more is replaced.
        lost = aio.run_sync(leases[1].try_take(KEY))
        assert isinstance(lost, Lease)

        async def nothing() -> None:
            return None

        assert isinstance(aio.run_sync(leases[2].acquire(KEY, nothing, 60)), Lease)
        assert aio.run_sync(list_leases(stores[3], KEY)) == [lost.number + 1]
        aio.run_sync(reader.touch(waited.found, now_s))
        assert abs(aio.run_sync(find()).used_s - now_s) < 600
        done = aio.run_sync(reader.gc(None, None, now_s + 2 * 86_400, beat_s=BEAT_S))
        assert [each.why for each in done.removals] == ["has expired"]
        assert aio.run_sync(reader.list(now_s)) == []
    finally:
        for store in stores:
            aio.run_sync(store.aclose())
