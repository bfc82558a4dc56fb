"""FaultyStore does what its plan says, to the calls that it names, and to no others."""

from __future__ import annotations

import asyncio

import pytest

from bootseer.errors import NotFound, PermissionDenied, SourceChanged, Unavailable
from bootseer.storage.memory import MemoryStore, forget
from tests.testing.faulty_store import RUBBISH, Fault, FaultyStore, Kind
from tests.unit.bootseer.storage.virtual import elapsed_s, run

DATA = bytes(range(100))


@pytest.fixture
def store() -> FaultyStore:
    forget("faulty-test")
    store = FaultyStore(MemoryStore("faulty-test"))
    run(store.publish("a/file", DATA))
    store.calls.clear()
    return store


async def read(
    store: FaultyStore, offset: int = 0, length: int = 100, etag: str = "", attempt: int = 0
) -> bytearray:
    target = bytearray(length)
    await store.read_into("a/file", offset, memoryview(target), etag=etag, attempt=attempt)
    return target


def test_error_keeps_what_came_and_leaves_rubbish(store: FaultyStore) -> None:
    store.plan = [Fault(Kind.ERROR, keep_bytes=30)]

    async def main() -> None:
        target = bytearray(100)
        with pytest.raises(Unavailable, match="by plan") as caught:
            await store.read_into("a/file", 0, memoryview(target))
        assert caught.value.read_bytes == 30
        assert target == DATA[:30] + RUBBISH * 70

    run(main())


def test_wrong_bytes_are_not_reported(store: FaultyStore) -> None:
    store.plan = [Fault(Kind.WRONG, keep_bytes=10)]
    got = run(read(store))
    assert [place for place in range(100) if got[place] != DATA[place]] == [10]


def test_changed_file(store: FaultyStore) -> None:
    async def main() -> None:
        before = await store.stat("a/file")
        store.plan = [Fault(Kind.CHANGED), Fault(Kind.CHANGED, "stat")]
        assert (await store.stat("a/file")).etag != before.etag
        assert await read(store) != DATA
        with pytest.raises(SourceChanged):
            await read(store, etag=before.etag)

    run(main())


def test_delay_and_stall(store: FaultyStore) -> None:
    async def main() -> None:
        store.plan = [Fault(Kind.DELAY, calls={0}, delay_s=3.0), Fault(Kind.STALL)]
        assert await read(store) == DATA
        assert elapsed_s() == 3.0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1000.0):
                await read(store)
        assert store.under_way == 0

    run(main())


def test_two_reads_must_not_share_memory(store: FaultyStore) -> None:
    async def main() -> None:
        store.plan = [Fault(Kind.DELAY, delay_s=1.0)]
        target = memoryview(bytearray(100))
        async with asyncio.TaskGroup() as group:
            group.create_task(store.read_into("a/file", 0, target[:50]))
            group.create_task(store.read_into("a/file", 0, target[50:]))
            await asyncio.sleep(0.5)
            with pytest.raises(AssertionError, match="share memory"):
                await store.read_into("a/file", 0, target[49:60])

    run(main())


def test_faults_hit_what_they_name(store: FaultyStore) -> None:
    store.plan = [Fault(Kind.ERROR, path="b/*"), Fault(Kind.ERROR, first=50, last=59, calls={1}, attempts={0, 2})]

    async def fails(offset: int, length: int, attempt: int = 0) -> bool:
        try:
            await read(store, offset, length, attempt=attempt)
        except Unavailable:
            return True
        return False

    async def main() -> None:
        assert not await fails(0, 50)
        assert not await fails(60, 10)
        assert not await fails(50, 1, attempt=1)
        assert not await fails(50, 1), "the first that fits"
        assert await fails(0, 51, attempt=2), "the second"
        assert not await fails(0, 51), "the third"

    run(main())
    assert store.count("read_into") == store.count("read_into", "a/*") == 6
    assert store.count("read_into", "b/*") == 0


def test_write_that_breaks_leaves_no_file(store: FaultyStore) -> None:
    store.plan = [Fault(Kind.ERROR, "write", first=10, keep_bytes=5, error=PermissionDenied)]

    async def main() -> None:
        with pytest.raises(PermissionDenied):
            async with store.create("a/new") as writer:
                await writer.write(b"x" * 10)
                await writer.write(b"x" * 10)
        with pytest.raises(NotFound):
            await store.stat("a/new")

    run(main())
    assert [(call.operation, call.offset, call.length) for call in store.calls[:3]] == [
        ("create", 0, 0),
        ("write", 0, 10),
        ("write", 10, 10),
    ]


@pytest.mark.parametrize("operation", ["publish", "create", "close", "concat", "delete", "list", "stat"])
@pytest.mark.parametrize("kind", [Kind.ERROR, Kind.LOST])
def test_other_operations_fail_before_or_after(store: FaultyStore, operation: str, kind: Kind) -> None:
    async def call() -> None:
        match operation:
            case "publish":
                await store.publish("a/other", b"new")
            case "create" | "close":
                async with store.create("a/other") as writer:
                    await writer.write(b"new")
            case "concat":
                await store.concat("a/other", ["a/file"])
            case "delete":
                await store.delete("a/file")
            case "list":
                await store.list("a")
            case "stat":
                await store.stat("a/file")

    async def main() -> list[str]:
        store.plan = [Fault(kind, operation)]
        with pytest.raises(Unavailable, match=r"\(by plan\)"):
            await call()
        store.plan = []
        return [entry.name for entry in await store.list("a")]

    done = {"publish": ["file", "other"], "close": ["file", "other"], "concat": ["other"], "delete": []}
    expected = done.get(operation, ["file"]) if kind is Kind.LOST else ["file"]
    assert run(main()) == expected
