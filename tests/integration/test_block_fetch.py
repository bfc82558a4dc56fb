"""Blocks over HTTP from a server that fails in all ways servers do: right bytes, or an error within the deadline.

Real sockets and threads; the leak check after each test sees to it that none is left.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.blocks.device import BlockSource, open_device
from bootseer.blocks.fetch import BlockFetcher
from bootseer.blocks.prefetch import Prefetcher
from bootseer.errors import BootseerError, IntegrityError, StorageTimeout
from bootseer.storage import open_store
from bootseer.storage.engine.ranges import TRIES
from tests.testing.faulty_http import FaultyHttpServer, HttpFault, HttpKind
from tests.unit.bootseer.blocks.trees import assert_right, make_tree, open_root

TREE = make_tree(48)
ALL = range(TREE.count)
DEADLINE_S = 10.0
SHORT_S = 0.5  # for what fails until then
SLACK_S = 1.0


@pytest.fixture
def server() -> Iterator[FaultyHttpServer]:
    with FaultyHttpServer(TREE.packs) as server:
        yield server
    aio.close()


@asynccontextmanager
async def fetching(
    directory: Path, *servers: FaultyHttpServer, timeout_s: float = 0.5, deadline_s: float = DEADLINE_S
) -> AsyncIterator[BlockFetcher]:
    stores = [open_store(server.url, timeout_s=timeout_s) for server in servers]
    with open_root(directory).open_tree(TREE.digest, TREE.count) as cache:
        fetcher = BlockFetcher(TREE.index, cache, stores, deadline_s=deadline_s)
        try:
            yield fetcher
        finally:
            await fetcher.aclose()
            for store in stores:
                await store.aclose()


async def read_each(
    fetcher: BlockFetcher, numbers: list[int], *, deadline_s: float = DEADLINE_S
) -> list[BootseerError]:
    """Reads blocks one by one; the errors. Each right or an error, in time."""
    errors: list[BootseerError] = []
    for number in numbers:
        begin_s = time.monotonic()
        try:
            assert_right(await fetcher.read_now([number]), TREE)
        except BootseerError as error:
            errors.append(error)
        assert time.monotonic() - begin_s < deadline_s + SLACK_S
    return errors


PASSING = [
    HttpFault(HttpKind.STATUS, status=503, requests=range(2)),
    HttpFault(HttpKind.STATUS, status=500, requests=range(2)),
    HttpFault(HttpKind.STATUS, status=429, retry_after_s=1, requests=range(1)),
    HttpFault(HttpKind.SILENCE, requests=range(1)),
    HttpFault(HttpKind.STALL, keep_bytes=1000, requests=range(1)),
    HttpFault(HttpKind.SHORT, keep_bytes=1000, requests=range(2)),
    HttpFault(HttpKind.RESET, keep_bytes=1000, requests=range(2)),
    HttpFault(HttpKind.SLOW, delay_s=0.2, requests=range(2)),
    HttpFault(HttpKind.DRIP, keep_bytes=1000, drip_bytes=20_000, delay_s=0.02, requests=range(1)),
    HttpFault(HttpKind.LESS, keep_bytes=1000, requests=range(2)),
    HttpFault(HttpKind.WRONG, keep_bytes=0, requests=range(1)),
    HttpFault(HttpKind.WRONG, keep_bytes=777, requests=range(1)),
    HttpFault(HttpKind.CHANGED, requests=range(1)),
]


@pytest.mark.parametrize(
    "fault", PASSING, ids=lambda fault: f"{fault.kind.value}-{fault.status}-{fault.keep_bytes}"
)
def test_faults_that_pass_are_not_seen(server: FaultyHttpServer, tmp_path: Path, fault: HttpFault) -> None:
    server.plan = [fault]

    async def main() -> None:
        async with fetching(tmp_path, server) as fetcher:
            assert await read_each(fetcher, [3, 40, 41]) == []
            await Prefetcher(fetcher, is_whole=True, quiet_s=0.0).run()
            assert fetcher.cache.missing(ALL) == []
            assert_right(await fetcher.read(ALL), TREE)

    asyncio.run(main())


LASTING = [
    HttpFault(HttpKind.STATUS, status=503),
    HttpFault(HttpKind.STATUS, status=404),
    HttpFault(HttpKind.STATUS, status=403),
    HttpFault(HttpKind.SILENCE),
    HttpFault(HttpKind.STALL, keep_bytes=1000),
    HttpFault(HttpKind.SHORT),
    HttpFault(HttpKind.RESET),
    HttpFault(HttpKind.DRIP, drip_bytes=1, delay_s=0.05),
    HttpFault(HttpKind.FULL),
    HttpFault(HttpKind.OTHER_RANGE),
    HttpFault(HttpKind.LYING_RANGE),
    HttpFault(HttpKind.WRONG, keep_bytes=5),
]


@pytest.mark.parametrize("fault", LASTING, ids=lambda fault: f"{fault.kind.value}-{fault.status}")
def test_faults_that_last_are_errors_in_time_or_repaired(
    server: FaultyHttpServer, tmp_path: Path, fault: HttpFault
) -> None:
    server.plan = [fault]

    async def main() -> None:
        async with fetching(tmp_path, server, deadline_s=SHORT_S) as fetcher:
            errors = await read_each(fetcher, [3, 40], deadline_s=SHORT_S)
            for error in errors:
                assert server.url in str(error)
            server.plan = []
            fetcher._deadline_s = fetcher._again_s = DEADLINE_S  # a machine that stands still is no fault
            assert await read_each(fetcher, [3, 40]) == []  # an error is not remembered

    asyncio.run(main())


def test_a_server_that_lies_is_found_out_by_the_digest(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.plan = [HttpFault(HttpKind.WRONG, keep_bytes=5)]

    async def main() -> None:
        async with fetching(tmp_path, server, deadline_s=SHORT_S) as fetcher:
            with pytest.raises(IntegrityError, match=r"block 7, bytes \d+ to \d+, does not match its digest"):
                await fetcher.read_now([7])
            assert fetcher.cache.missing([7]) == [7]

    asyncio.run(main())


def test_a_silent_server_ends_at_the_deadline(server: FaultyHttpServer, tmp_path: Path) -> None:
    server.plan = [HttpFault(HttpKind.SILENCE)]

    async def main() -> None:
        async with fetching(tmp_path, server, timeout_s=60.0, deadline_s=SHORT_S) as fetcher:
            begin_s = time.monotonic()
            with pytest.raises(StorageTimeout):
                await fetcher.read_now([7])
            assert time.monotonic() - begin_s < SHORT_S + SLACK_S

    asyncio.run(main())


def test_a_server_that_is_down_for_a_while_is_waited_for(server: FaultyHttpServer, tmp_path: Path) -> None:
    """Longer than a read's own tries last: an error would end the program that reads."""
    server.plan = [HttpFault(HttpKind.STATUS)]

    async def main() -> None:
        async with fetching(tmp_path, server) as fetcher:
            read = asyncio.ensure_future(fetcher.read_now([7]))
            async with asyncio.timeout(DEADLINE_S):
                while server.count() < 7:
                    await asyncio.sleep(0.01)
            assert not read.done()
            server.plan = []
            assert_right(await read, TREE)

    asyncio.run(main())


@pytest.mark.parametrize(
    "fault",
    [
        HttpFault(HttpKind.WRONG, keep_bytes=5),
        HttpFault(HttpKind.STATUS, status=403),
        HttpFault(HttpKind.STATUS, status=404),
    ],
    ids=lambda fault: f"{fault.kind.value}-{fault.status}",
)
def test_what_no_try_repairs_is_waited_for_until_the_deadline(
    server: FaultyHttpServer, tmp_path: Path, fault: HttpFault
) -> None:
    """Somebody may mend the store meanwhile, or another source may have the block by then."""
    server.plan = [fault]

    async def main() -> None:
        async with fetching(tmp_path, server) as fetcher:
            read = asyncio.ensure_future(fetcher.read_now([7]))
            async with asyncio.timeout(DEADLINE_S):
                while server.count() < 7 and not read.done():
                    await asyncio.sleep(0.01)
            server.plan = []
            assert_right(await read, TREE)

    asyncio.run(main())


def test_another_server_stands_in(server: FaultyHttpServer, tmp_path: Path) -> None:
    with FaultyHttpServer(TREE.packs) as other:
        server.plan = [HttpFault(HttpKind.STATUS, status=404)]

        async def main() -> None:
            async with fetching(tmp_path, server, other) as fetcher:
                assert await read_each(fetcher, list(ALL)) == []

        asyncio.run(main())
        assert sum(other.served_bytes.values()) >= TREE.index.stored_bytes


def test_a_server_that_restarts_is_not_noticed(server: FaultyHttpServer, tmp_path: Path) -> None:
    async def main() -> None:
        async with fetching(tmp_path, server) as fetcher:
            for number in ALL:
                if number % 8 == 0:
                    server.drop_connections()
                assert await read_each(fetcher, [number]) == []

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(8))
def test_all_at_once(server: FaultyHttpServer, tmp_path: Path, seed: int) -> None:
    """Readers of a mount, an unpacker and a prefetcher, while the server fails now and then in every way.

    Three requests fail: a fourth failure of the same read, in whatever order they come, would be one too many.
    """
    chance = random.Random(seed)
    kinds = chance.sample([HttpKind.STATUS, HttpKind.STALL, HttpKind.SHORT, HttpKind.RESET], TRIES - 1)
    failing = chance.sample(range(40), len(kinds))
    server.plan = [
        HttpFault(kind, keep_bytes=chance.randrange(5000), requests=[number])
        for kind, number in zip(kinds, failing, strict=True)
    ]
    server.plan.append(HttpFault(HttpKind.SLOW, delay_s=0.1, requests=chance.sample(range(40), 6)))
    server.plan.append(HttpFault(HttpKind.WRONG, requests=[chance.randrange(20)]))  # twice would be an error
    device_bytes = TREE.device()

    async def main() -> None:
        async with fetching(tmp_path, server) as fetcher:
            loop = asyncio.get_running_loop()

            def unpack() -> None:
                for number, raw in BlockSource(fetcher, loop).read_blocks(reversed(ALL)):
                    assert raw == TREE.raws[number]

            async def read(device, turns: int) -> None:  # type: ignore[no-untyped-def]
                for _ in range(turns):
                    offset = chance.randrange(len(device_bytes) - 70_000)
                    target = memoryview(bytearray(chance.randrange(1, 70_000)))
                    wanted = device_bytes[offset : offset + len(target)]
                    if not device.try_read(offset, target):
                        answer = loop.create_future()
                        device.read_later(offset, len(target), lambda data, answer=answer: answer.set_result(data))
                        target = await answer
                        assert target is not None
                    assert target == wanted

            async with open_device(fetcher) as device, asyncio.TaskGroup() as group:
                group.create_task(Prefetcher(fetcher, chance.sample(ALL, 20), is_whole=True).run())
                group.create_task(aio.run_abandonable(unpack, timeout_s=60.0))
                for _ in range(6):
                    group.create_task(read(device, 40))
            assert fetcher.cache.missing(ALL) == []

    asyncio.run(main())
