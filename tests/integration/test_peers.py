"""Nodes that help each other, over real sockets: each byte out of the store once, and the store as the way back.

Peers lie, hang, stall, drip, break off and die: the bytes are right, in a bounded time.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.peers_node import RECEIVERS, receive_by
from bootseer import aio
from bootseer.blocks.fetch import BlockFetcher
from bootseer.blocks.prefetch import Prefetcher
from bootseer.errors import DigestMismatch, IntegrityError, NotFound, StorageError
from bootseer.peers import PeerStore, health, helpers, write_peers
from bootseer.peers.auth import origin_id
from bootseer.peers.health import State
from bootseer.peers.spans import SPAN_BYTES, ObjectName, cut, owners
from bootseer.peers.store import SpanChecksums
from bootseer.storage import RangeReader, RangeRequest
from bootseer.storage.below import SubdirectoryStore
from bootseer.tree.reading import StoreBlocks
from tests import support
from tests.peer_nodes import PeerNode, PeerNodes
from tests.support import tune
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind
from tests.testing.faulty_peer import PeerFault
from tests.unit.bootseer.blocks.trees import assert_right, make_tree, open_root

MIB = 1 << 20
FILES = {name: random.Random(name).randbytes(9 * MIB + 321) for name in ("packs/one", "packs/two.bin")}
TREE = make_tree(48)
SHORT_S = 1.0  # what a peer gets here; healthy ones are not late on a busy machine


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer(FILES) as server:
        yield server
    aio.close()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers get little time."""
    tune(monkeypatch, peers__begin_s=SHORT_S, peers__stall_s=SHORT_S)
    for name in ("MIN_LATE_S", "FIRST_LATE_S", "MAX_LATE_S"):
        monkeypatch.setattr(health, name, 2 * SHORT_S)


def run(coroutine: Callable[[], Coroutine[Any, Any, None]], limit_s: float = 60.0) -> None:
    async def main() -> None:
        async with asyncio.timeout(limit_s):
            await coroutine()

    asyncio.run(main())


async def read_all(store: PeerStore, *, names: list[str] | None = None) -> dict[str, int]:
    """All files as a node that starts reads them. Returns: statistics of the store."""
    reader = RangeReader(store)
    targets = {name: bytearray(len(FILES[name])) for name in names or FILES}
    requests = [RangeRequest(name, 0, memoryview(target)) for name, target in targets.items()]
    await reader.read(requests)
    assert all(target == FILES[name] for name, target in targets.items())
    return store.statistics()


async def seen(store: PeerStore, *ids: str) -> None:
    """Until a reader knows of these nodes and no others; it looks now and then."""
    async with asyncio.timeout(10.0):
        while True:
            job = store._helpers._file.current()
            if [node.id for node in (job.nodes if job else ())] == list(ids):
                return
            await asyncio.sleep(0.01)


async def read_on(nodes: PeerNodes, *numbers: int) -> list[dict[str, int]]:
    """On these nodes at the same time."""
    stores = [nodes.store(number) for number in numbers]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(read_all(store)) for store in stores]
        return [task.result() for task in tasks]
    finally:
        for store in stores:
            await store.aclose()


SIZE = sum(map(len, FILES.values()))


def moved(origin: str, before: list[str], after: list[str]) -> int:
    """Bytes of spans that have another owner among other nodes."""
    return sum(
        part.length
        for name, data in FILES.items()
        for part in cut(0, len(data))
        if len({owners(ids, ObjectName(origin, name), part.span)[0] for ids in (before, after)}) > 1
    )


def served(server: FaultyHttpServer) -> int:
    return sum(server.served_bytes.values())


# ---- when all goes well --------------------------------------------------------------------------------------


def test_each_byte_leaves_the_store_once(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 4) as nodes:

        async def main() -> None:
            found = await read_on(nodes, 0, 1, 2, 3)
            assert served(server) == SIZE
            assert [each["store_bytes"] for each in found] == [0] * 4
            assert [each["bypasses"] for each in found] == [0] * 4
            # Later ones need nothing of it.
            await read_on(nodes, 1, 2)
            assert served(server) == SIZE

        run(main)
        support.wait_until(lambda: nodes.held() == 0)
        uploads = [each.server.statistics() for each in nodes.all]
    assert sum(each["upload_bytes"] + each["local_bytes"] for each in uploads) == 6 * SIZE  # type: ignore
    assert sum(each["store_read_bytes"] for each in uploads) == SIZE  # type: ignore[misc]
    assert all(set(each["sent_to"]) <= {"node0", "node1", "node2", "node3"} for each in uploads)  # type: ignore


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_readers_that_the_bench_compares_read_the_same(
    server: FaultyHttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, receiver: str
) -> None:
    monkeypatch.setattr(helpers, "Peer", helpers.Peer)
    receive_by(receiver)
    with PeerNodes(tmp_path, server.url, 3) as nodes:

        async def main() -> None:
            for found in await read_on(nodes, 0, 1, 2):
                assert (found["peer_bytes"], found["store_bytes"], found["bypasses"]) == (SIZE, 0, 0)

        run(main)


def test_only_what_is_asked_for_leaves_the_store(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 3) as nodes:

        async def main() -> None:
            store = nodes.store(0)
            for offset, length in ((5 * MIB + 7, 100_000), (5 * MIB, 200_000), (SPAN_BYTES - 10, 20)):
                target = bytearray(length)
                await store.read_into("packs/one", offset, memoryview(target))
                assert target == FILES["packs/one"][offset : offset + length]
            await store.aclose()

        run(main)
    assert served(server) == 200_020


def test_two_jobs_side_by_side(server: FaultyHttpServer, tmp_path: Path) -> None:
    other = bytes(range(32))
    with (
        PeerNodes(tmp_path, server.url, 2) as one,
        PeerNodes(tmp_path, server.url, 2, key=other, job="run-2") as two,
    ):

        async def main() -> None:
            await asyncio.gather(read_on(one, 0, 1), read_on(two, 0, 1))

        run(main)
        assert served(server) == 2 * SIZE
        assert [each.server.statistics()["refused"] for each in one.all + two.all] == [0] * 4


def test_what_the_job_did_not_name_is_had_from_the_store(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 2, below=["index"]) as nodes:

        async def main() -> None:
            (found,) = await read_on(nodes, 0)
            assert (found["store_bytes"], found["peer_bytes"], found["asked"]) == (SIZE, 0, 0)

        run(main)


def test_without_a_file_or_with_one_node_the_store_is_read(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 2) as nodes:

        async def main() -> None:
            store = nodes.store(0)
            nodes.write([nodes[0]])
            assert (await read_all(store))["peer_bytes"] == 0
            nodes.write()
            await seen(store, "node0", "node1")
            assert (await read_all(store))["peer_bytes"] == SIZE
            Path(nodes[0].path).unlink()
            await seen(store)
            assert (await read_all(store))["peer_bytes"] == SIZE
            await store.aclose()

        run(main)


def test_a_slow_store_does_not_make_its_owner_late(
    server: FaultyHttpServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sign of life says that it waits as well: nobody else asks the store for the same."""
    tune(monkeypatch, peers__begin_s=SHORT_S)
    monkeypatch.setattr("bootseer.peers.server.KEEPALIVE_S", 0.1)
    server.plan = [HttpFault(HttpKind.SLOW, delay_s=3 * SHORT_S)]
    with PeerNodes(tmp_path, server.url, 3) as nodes:

        async def main() -> None:
            for found in await read_on(nodes, 0, 1, 2):
                assert found["late"] == found["bypasses"] == 0

        run(main)
    assert served(server) == SIZE


def test_what_is_missing_or_short_is_reported_as_the_store_tells_it(
    server: FaultyHttpServer, tmp_path: Path
) -> None:
    with PeerNodes(tmp_path, server.url, 3) as nodes:

        async def main() -> None:
            store = nodes.store(0)
            target = memoryview(bytearray(10 * MIB))
            with pytest.raises(NotFound, match="none"):
                await store.read_into("packs/none", 0, target)
            with pytest.raises(IntegrityError, match="one"):
                await store.read_into("packs/one", 9 * MIB, target[:1000])
            assert (await read_all(store))["bypasses"] > 0
            assert all(store._helpers.health.state(each.id) is State.WELL for each in nodes.all)
            await store.aclose()

        run(main)


def test_uploads_keep_to_their_limit(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 2, upload_bytes_per_s=8 * MIB) as nodes:

        async def main() -> None:
            begin_s = time.monotonic()
            await read_on(nodes, 0)
            most = max(each.server.statistics()["upload_bytes"] for each in nodes.all)  # type: ignore[type-var]
            assert time.monotonic() - begin_s > most / (8 * MIB) - 0.2  # type: ignore[operator]

        run(main)


def test_a_forked_reader_begins_with_no_connections(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 3) as nodes:
        store = nodes.store(0)
        run(lambda: read(store))
        connections = [count(each) for each in nodes.all]
        child = os.fork()
        if not child:
            status = 1
            try:
                asyncio.run(read(store))
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        support.wait_until(lambda: [count(each) for each in nodes.all] == connections)
        run(lambda: read(store))
        assert [count(each) for each in nodes.all] == connections, "the parent's are as good as before"
        assert store.statistics()["lost"] == 0
        run(store.aclose)


async def read(store: PeerStore) -> None:
    target = bytearray(len(FILES["packs/one"]))
    await store.read_into("packs/one", 0, memoryview(target))
    assert target == FILES["packs/one"]


def count(each: PeerNode) -> object:
    return each.server.statistics()["connections"]


def test_nodes_come_and_go(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 4) as nodes:

        async def main() -> None:
            nodes.write(nodes.all[:3])
            store = nodes.store(0)
            found = await read_all(store)
            assert "from_node3_bytes" not in found
            before = served(server)
            assert before == SIZE
            # Another node, and one less: only spans that have another owner now leave the store again.
            nodes.stop(nodes[1])
            nodes.write([nodes[0], nodes[2], nodes[3]])
            await seen(store, "node0", "node2", "node3")
            found = await read_all(store)
            assert found["bypasses"] == found["lost"] == 0
            nodes_now = ["node0", "node2", "node3"]
            assert served(server) - before == moved(nodes.origin, ["node0", "node1", "node2"], nodes_now)
            await store.aclose()

        run(main)


# ---- peers that do what they should not ----------------------------------------------------------------------


@pytest.mark.parametrize("fault", [PeerFault.SILENT, PeerFault.STALLS, PeerFault.DRIPS, PeerFault.BREAKS])
@pytest.mark.usefixtures("hurried")
def test_a_peer_that_fails_is_bypassed(server: FaultyHttpServer, tmp_path: Path, fault: PeerFault) -> None:
    with PeerNodes(tmp_path, server.url, 4) as nodes:
        bad = nodes.owner("packs/one", 1)
        bad.server.fault = fault
        others = [number for number in range(4) if nodes[number] is not bad]

        async def main() -> None:
            begin_s = time.monotonic()
            for found in await read_on(nodes, *others):
                assert found["late"] + found["lost"] > 0
                assert found["lies"] == 0
            # Two peers at most, and the store; what else it takes is this machine's.
            assert time.monotonic() - begin_s < 2 * 2 * SHORT_S + 30.0

        run(main)
        assert served(server) < 2.5 * SIZE


def test_dead_peers_are_out_at_once(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 4) as nodes:
        dead = nodes.owner("packs/one", 1)
        nodes.stop(dead)
        others = [number for number in range(4) if nodes[number] is not dead]

        async def main() -> None:
            begin_s = time.monotonic()
            for found in await read_on(nodes, *others):
                assert found["lost"] > 0
                assert found["late"] == found["bypasses"] == found["store_bytes"] == 0
            assert time.monotonic() - begin_s < 5.0

        run(main)
        assert served(server) == SIZE, "the next owner brings it for all"


def test_all_dead(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 3) as nodes:
        for each in nodes.all:
            nodes.stop(each)

        async def main() -> None:
            (found,) = await read_on(nodes, 0)
            assert (found["store_bytes"], found["peer_bytes"]) == (SIZE, 0)

        run(main)


def test_a_peer_with_another_key_gives_nothing(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 3) as nodes:
        write_peers(nodes[0].path, nodes.peers("node0", key=(b"x" * 32).hex()))

        async def main() -> None:
            store = nodes.store(0)
            nodes.stop(nodes[0])  # its own server has the other key as well
            found = await read_all(store)
            assert (found["store_bytes"], found["peer_bytes"]) == (SIZE, 0)
            assert found["foreign"] >= 2
            assert not any(store._helpers.health.may_ask(each.id, 0.0) for each in nodes.all)
            await store.aclose()

        run(main)


def test_a_store_that_is_gone_is_not_missed(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 3) as nodes:

        async def main() -> None:
            await read_on(nodes, 0)
            server.close()
            for found in await read_on(nodes, 1, 2):
                assert (found["store_bytes"], found["bypasses"]) == (0, 0)
            store = nodes.store(1)
            with pytest.raises(StorageError):
                await store.read_into("packs/one", 0, memoryview(bytearray(1)), attempt=1)
            await store.aclose()

        run(main)


def test_a_spool_without_room_sends_readers_to_the_store(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 2, spool_bytes=SPAN_BYTES) as nodes:
        for each in nodes.all:
            each.spool.shrink()  # as when its disk is full

        async def main() -> None:
            for found in await read_on(nodes, 0, 1):
                assert (found["store_bytes"], found["peer_bytes"]) == (SIZE, 0)
                assert found["no_room"] > 0
                assert found["late"] == found["lost"] == 0

        run(main)


def test_a_small_spool_is_used_again_and_again(server: FaultyHttpServer, tmp_path: Path) -> None:
    with PeerNodes(tmp_path, server.url, 2, spool_bytes=2 * SPAN_BYTES) as nodes:

        async def main() -> None:
            for found in [await read_on(nodes, 0), await read_on(nodes, 1)]:
                assert found[0]["peer_bytes"] > 0

        run(main)
        assert all(each.spool.statistics()["kept_bytes"] <= 2 * SPAN_BYTES for each in nodes.all)


# ---- peers that lie ------------------------------------------------------------------------------------------


def test_a_liar_is_found_and_struck_out(tmp_path: Path) -> None:
    """By whoever verifies: the fetcher of a tree's blocks."""
    with FaultyHttpServer(TREE.packs) as server, PeerNodes(tmp_path, server.url, 3) as nodes:
        liar = nodes.owner(next(iter(TREE.packs)))
        liar.server.fault = PeerFault.LIES
        reader = next(number for number in range(3) if nodes[number] is not liar)

        async def main() -> None:
            store = nodes.store(reader)
            with open_root(tmp_path).open_tree(TREE.digest, TREE.count) as cache:
                fetcher = BlockFetcher(TREE.index, cache, [store])
                await Prefetcher(fetcher, is_whole=True, quiet_s=0.0).run()
                assert fetcher.cache.missing(range(TREE.count)) == []
                assert_right(await fetcher.read(range(TREE.count)), TREE)
                assert fetcher.statistics()["wrong_blocks"] > 0
                await fetcher.aclose()
            found = store.statistics()
            assert found["lies"] == 1
            assert store._helpers.health.state(liar.id) is State.STRUCK
            asked = found["asked"]
            target = memoryview(bytearray(10))
            await store.read_into(next(iter(TREE.packs)), 0, target)
            assert store.statistics()[f"from_{liar.id}_bytes"] == found[f"from_{liar.id}_bytes"]
            assert store.statistics()["asked"] == asked + 1
            await store.aclose()

        run(main)
    aio.close()


def test_unpackers_find_liars_as_well(tmp_path: Path) -> None:
    packs = {f"env/{name}": data for name, data in TREE.packs.items()}
    with FaultyHttpServer(packs) as server, PeerNodes(tmp_path, server.url, 3) as nodes:
        liar = nodes.owner(next(iter(packs)))
        liar.server.fault = PeerFault.LIES
        store = nodes.store(next(number for number in range(3) if nodes[number] is not liar))
        blocks = StoreBlocks(SubdirectoryStore(store, "env"), TREE.index)
        assert_right(dict(blocks.read_blocks(range(TREE.count))), TREE)
        assert store._helpers.health.state(liar.id) is State.STRUCK
        assert store.statistics()["lies"] == 1
        aio.run_sync(store.aclose())
    aio.close()


def test_who_gave_what_the_store_has_is_no_liar(tmp_path: Path) -> None:
    packs = {name: bytes([data[0] ^ 1]) + data[1:] for name, data in TREE.packs.items()}
    with FaultyHttpServer(packs) as server, PeerNodes(tmp_path, server.url, 3) as nodes:

        async def main() -> None:
            store = nodes.store(0)
            with open_root(tmp_path).open_tree(TREE.digest, TREE.count) as cache:
                fetcher = BlockFetcher(TREE.index, cache, [store])
                with pytest.raises(IntegrityError, match="damaged"):
                    await fetcher.read([0])
                await fetcher.aclose()
            assert store.statistics()["lies"] == 0
            assert all(store._helpers.health.state(each.id) is State.WELL for each in nodes.all)
            await store.aclose()

        run(main)
    aio.close()


def test_spans_with_known_digests_are_verified_here(server: FaultyHttpServer, tmp_path: Path) -> None:
    data = FILES["packs/one"]
    digests = [hashlib.sha256(data[at : at + SPAN_BYTES]).digest() for at in range(0, len(data), SPAN_BYTES)]
    sums = {"packs/one": SpanChecksums(len(data), tuple(digests))}
    with PeerNodes(tmp_path, server.url, 3) as nodes:
        liar = nodes.owner("packs/one", len(digests) - 1)  # the last one, which is shorter
        liar.server.fault = PeerFault.LIES
        own = next(number for number in range(3) if nodes[number] is not liar)

        async def main() -> None:
            store = nodes.store(own, sums=sums)
            await read_all(store, names=["packs/one"])
            assert store.statistics()["lies"] == 1
            await store.aclose()
            wrong = {"packs/one": SpanChecksums(len(data), (b"x" * 32, *digests[1:]))}
            store = nodes.store(own, sums=wrong)
            with pytest.raises(DigestMismatch, match="packs/one"):
                await store.read_into("packs/one", 0, memoryview(bytearray(len(data))))
            await store.aclose()

        run(main)


def test_of_several_givers_the_liar_is_found_by_the_stores_bytes(server: FaultyHttpServer, tmp_path: Path) -> None:
    """A unit of a checkpoint is several spans."""
    ids = ["node0", "node1", "node2"]
    for seed in range(100):  # a key by which the two spans have different owners, and neither is the reader
        key = bytes([seed]) * 32
        name = ObjectName(origin_id(key, server.url), "packs/one")
        pair = [owners(ids, name, span)[0] for span in (0, 1)]
        if sorted(pair) == ["node1", "node2"]:
            break
    with PeerNodes(tmp_path, server.url, 3, key=key) as nodes:
        liar, honest = nodes.owner("packs/one", 0), nodes.owner("packs/one", 1)
        liar.server.fault = PeerFault.LIES

        async def main() -> None:
            store = nodes.store(0)
            target = bytearray(2 * SPAN_BYTES)
            await store.read_into("packs/one", 0, memoryview(target))
            assert target != FILES["packs/one"][: len(target)]
            store.distrust("packs/one", 0, len(target))
            assert store.statistics()["lies"] == 0, "it is not known who it was"
            await store.read_into("packs/one", 0, memoryview(target), attempt=1)
            assert target == FILES["packs/one"][: len(target)]
            assert store._helpers.health.state(liar.id) is State.STRUCK
            assert store._helpers.health.state(honest.id) is State.WELL
            await store.aclose()

        run(main)


# ---- cancelled -----------------------------------------------------------------------------------------------


def test_a_read_may_be_cancelled_at_any_moment(server: FaultyHttpServer, tmp_path: Path) -> None:
    """Nothing is written afterwards, nothing stays held, and the next read is right."""
    with PeerNodes(tmp_path, server.url, 3) as nodes:

        async def main() -> None:
            store = nodes.store(0)
            data = FILES["packs/one"]
            memory = memoryview(bytearray(len(data)))
            cancelled = 0
            for turn in range(40):
                task = asyncio.create_task(store.read_into("packs/one", 0, memory))
                for _ in range(turn):
                    await asyncio.sleep(0)
                if turn % 4 == 3:
                    await asyncio.sleep(0.0002 * turn)
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    cancelled += 1
                mark = bytes([turn + 1]) * len(data)
                memory[:] = mark
                await asyncio.sleep(0.002)
                assert memory == mark
            assert cancelled > 20
            assert (await read_all(store))["lies"] == 0
            assert all(store._helpers.health.state(each.id) is State.WELL for each in nodes.all)
            await store.aclose()

        run(main)
        support.wait_until(lambda: nodes.held() == 0)
        support.wait_until(lambda: all(each.server.statistics()["connections"] == 0 for each in nodes.all))
        assert served(server) == SIZE, "what was begun was not thrown away"
