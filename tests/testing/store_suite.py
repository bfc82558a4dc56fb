"""Tests that every store must pass, one for each sentence of `bootseer.storage.protocol.Store`.

Subclass `StoreSuite` in a test file and add a fixture `make_store`: a function that opens a store on the same
fresh, empty place each time. A read-only store uses `ReadingSuite`, with its own `put`, and `ReadOnlySuite`. A
store tests its special features (deadlines, permissions, huge files) itself.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, ParamSpec

import pytest

from bootseer.errors import (
    AlreadyExists,
    BootseerError,
    IntegrityError,
    NotFound,
    SourceChanged,
    StorageError,
    Truncated,
)
from bootseer.storage.protocol import Entry, Stat, Store
from bootseer.storage.staging import staged

P = ParamSpec("P")
MIB = 1 << 20
MakeStore = Callable[[], Store]

NAMES = [
    *(
        "with space.bin",
        "trailing. ",
        "ünïcode-漢字-🙂.bin",
        "100%.bin",
        "%41%2f.bin",
        "a+b&c=d.bin",
        "hash#mark.bin",
    ),
    *(
        "question?.bin",
        "semi;colon,comma.bin",
        "quote'\".bin",
        "(round)[square]{curly}.bin",
        ".hidden",
        "~tilde",
        "-dash",
    ),
    *("star*.bin", "at@colon:.bin", "back`tick^pipe|.bin", "<less>.bin", "x" * 200),
]
BAD_PATHS = [
    *(
        "",
        "/",
        "/absolute",
        "..",
        "../up",
        "a/../b",
        "a/..",
        ".",
        "./a",
        "a/.",
        "a//b",
        "a/",
        "a\\b",
        "..\\up",
        "a\0b",
    ),
    *("a\nb", "x" * 5000),
]


def runs(*, limit_s: float = 60.0) -> Callable[[Callable[P, Awaitable[None]]], Callable[P, None]]:
    """Run an async test on its own loop, and close its stores afterwards."""

    def decorate(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            async def main() -> None:
                try:
                    async with asyncio.timeout(limit_s):
                        await test(*args, **kwargs)
                finally:
                    for value in kwargs.values():
                        if hasattr(value, "aclose"):
                            await value.aclose()

            asyncio.run(main())

        return run

    return decorate


def pattern(size: int, seed: int = 0) -> bytes:
    """Return bytes without two equal ranges of some length."""
    words = (size + 7) // 8
    block = b"".join(((seed << 40) + index).to_bytes(8, "little") for index in range(min(words, 65536)))
    out = bytearray()
    turn = 0
    while len(out) < size:
        out += turn.to_bytes(8, "big") + block
        turn += 1
    return bytes(out[:size])


async def read(store: Store, path: str, offset: int, length: int, **options: Any) -> bytes:
    """Return a range as bytes."""
    target = bytearray(length)
    await store.read_into(path, offset, memoryview(target), **options)
    return bytes(target)


async def is_there(store: Store, path: str) -> bool:
    try:
        await store.stat(path)
    except NotFound:
        return False
    return True


class ReadingSuite:
    """Tests of stores that can be read."""

    has_etags: ClassVar[bool] = True  # versions can be distinguished

    @pytest.fixture
    def make_store(self) -> MakeStore:
        """Return a function that opens a store on a place that is empty when the test begins."""
        raise NotImplementedError("a subclass gives the stores")

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Store:
        return make_store()

    async def put(self, store: Store, path: str, data: bytes) -> None:
        """Create a file, or another version of it."""
        await store.publish(path, data)

    @runs()
    async def test_stat_gives_size_and_version(self, store: Store) -> None:
        await self.put(store, "folder/file.bin", pattern(12345))
        found = await store.stat("folder/file.bin")
        assert isinstance(found, Stat)
        assert found.size == 12345
        assert await store.stat("folder/file.bin") == found
        assert bool(found.etag) == self.has_etags

    @runs()
    async def test_versions_differ(self, store: Store) -> None:
        if not self.has_etags:
            return
        seen = set()
        for turn in range(3):  # of one size
            await self.put(store, "file.bin", pattern(1000, seed=turn))
            seen.add((await store.stat("file.bin")).etag)
        assert len(seen) == 3

    @runs()
    async def test_what_is_missing_is_not_found(self, store: Store) -> None:
        await self.put(store, "folder/file.bin", b"x")
        for path in ("missing.bin", "folder/missing.bin", "no/such/folder/file.bin", "folder/file.bi"):
            with pytest.raises(NotFound) as caught:
                await store.stat(path)
            assert path.rpartition("/")[2] in str(caught.value), "the message names the culprit"
            with pytest.raises(NotFound):
                await read(store, path, 0, 1)

    @runs()
    async def test_directories_are_no_files(self, store: Store) -> None:
        await self.put(store, "folder/below/file.bin", b"x")
        for path in ("folder", "folder/below"):
            with pytest.raises(NotFound):
                await store.stat(path)
            with pytest.raises(StorageError):
                await read(store, path, 0, 1)

    @runs()
    async def test_a_file_is_no_directory(self, store: Store) -> None:
        await self.put(store, "file.bin", b"x")
        with pytest.raises(NotFound):
            await store.stat("file.bin/below")
        with pytest.raises(NotFound):
            await read(store, "file.bin/below", 0, 1)

    @runs()
    async def test_ranges(self, store: Store) -> None:
        data = pattern(3 * MIB + 17)
        await self.put(store, "file.bin", data)
        size = len(data)
        ranges = [
            (0, size),
            (0, 1),
            (size - 1, 1),
            (1, size - 2),
            (4095, 4098),
            (4096, 4096),
            (MIB, MIB),
            (7, 2 * MIB),
        ]
        ranges += [(12345, 65536 * 3 + 1), (size - 70000, 70000), (1, 100), (0, 4096)]
        for offset, length in ranges:
            assert await read(store, "file.bin", offset, length) == data[offset : offset + length], (
                offset,
                length,
            )

    @runs()
    async def test_a_large_range(self, store: Store) -> None:
        data = pattern(21 * MIB + 5)
        await self.put(store, "file.bin", data)
        assert await read(store, "file.bin", 3, len(data) - 3) == data[3:]

    @runs()
    async def test_nothing_is_written_beside_the_target(self, store: Store) -> None:
        data = pattern(300_000)
        await self.put(store, "file.bin", data)
        memory = bytearray(b"\xee" * 400_000)
        await store.read_into("file.bin", 1000, memoryview(memory)[50_000:250_000])
        assert memory[:50_000] == b"\xee" * 50_000
        assert memory[50_000:250_000] == data[1000:201_000]
        assert memory[250_000:] == b"\xee" * 150_000

    @runs()
    async def test_empty_ranges_and_files(self, store: Store) -> None:
        await self.put(store, "empty.bin", b"")
        await self.put(store, "file.bin", b"abc")
        assert (await store.stat("empty.bin")).size == 0
        for path, offset in (("empty.bin", 0), ("file.bin", 0), ("file.bin", 2), ("file.bin", 3)):
            assert await read(store, path, offset, 0) == b""
        for path, offset, length in (("empty.bin", 0, 1), ("file.bin", 4, 0), ("empty.bin", 1, 0)):
            with pytest.raises(Truncated):
                await read(store, path, offset, length)
        with pytest.raises(NotFound):
            await read(store, "missing.bin", 0, 0)

    @runs()
    async def test_ranges_past_the_end(self, store: Store) -> None:
        await self.put(store, "file.bin", pattern(1000))
        for offset, length in ((0, 1001), (999, 2), (1000, 1), (1001, 1), (5000, 10), (1 << 40, 1), (1, 1000)):
            with pytest.raises(Truncated) as caught:
                await read(store, "file.bin", offset, length)
            assert "file.bin" in str(caught.value)
        assert await read(store, "file.bin", 0, 1000) == pattern(1000)

    @runs()
    async def test_offsets_below_zero(self, store: Store) -> None:
        await self.put(store, "file.bin", pattern(1000))
        for offset in (-1, -1000, -(1 << 70)):
            with pytest.raises(StorageError):
                await read(store, "file.bin", offset, 1)

    @runs()
    async def test_a_version_is_never_taken_for_another(self, store: Store) -> None:
        if not self.has_etags:
            return
        first = pattern(200_000, seed=1)
        await self.put(store, "file.bin", first)
        before = (await store.stat("file.bin")).etag
        assert await read(store, "file.bin", 10, 150_000, etag=before) == first[10:150_010]
        second = pattern(200_000, seed=2)
        await self.put(store, "file.bin", second)
        for offset, length in ((0, 1), (10, 150_000), (0, 200_000), (199_999, 1)):
            with pytest.raises(SourceChanged):
                await read(store, "file.bin", offset, length, etag=before)
        with pytest.raises(SourceChanged):
            await read(store, "file.bin", 0, 0, etag=before)
        now = (await store.stat("file.bin")).etag
        assert await read(store, "file.bin", 10, 150_000, etag=now) == second[10:150_010]
        await self.put(store, "file.bin", b"short")
        with pytest.raises(IntegrityError):
            await read(store, "file.bin", 0, 200_000, etag=now)

    @runs()
    async def test_names(self, store: Store) -> None:
        for index, name in enumerate(NAMES):
            path = f"folder {index}/{name}" if index % 2 else name
            await self.put(store, path, name.encode())
        for index, name in enumerate(NAMES):
            path = f"folder {index}/{name}" if index % 2 else name
            data = name.encode()
            assert (await store.stat(path)).size == len(data), path
            assert await read(store, path, 0, len(data)) == data, path

    @runs()
    async def test_deep_directories(self, store: Store) -> None:
        path = "/".join(f"level{level}" for level in range(30)) + "/file.bin"
        await self.put(store, path, b"deep")
        assert await read(store, path, 0, 4) == b"deep"

    @runs()
    async def test_paths_that_leave_the_root_are_refused(self, store: Store) -> None:
        await self.put(store, "a/b", b"x")
        before = store.statistics()["requests"]
        for path in BAD_PATHS:
            for call in (store.stat(path), read(store, path, 0, 1)):
                with pytest.raises(StorageError):
                    await call
        assert store.statistics()["requests"] == before, "the store was not even asked"

    @runs()
    async def test_many_at_once(self, store: Store) -> None:
        data = pattern(4 * MIB)
        await self.put(store, "file.bin", data)

        async def one(index: int) -> None:
            offset = index * 100_003 % (3 * MIB)
            length = 200_000 + index
            assert await read(store, "file.bin", offset, length) == data[offset : offset + length]

        async with asyncio.TaskGroup() as group:
            for index in range(40):
                group.create_task(one(index))

    @runs()
    async def test_another_way_gives_the_same(self, store: Store) -> None:
        data = pattern(100_000)
        await self.put(store, "file.bin", data)
        for attempt in (1, 2, 7):
            assert await read(store, "file.bin", 5, 90_000, attempt=attempt) == data[5:90_005]

    @runs()
    async def test_after_a_cancel_nobody_writes(self, store: Store) -> None:
        data = pattern(16 * MIB)
        await self.put(store, "file.bin", data)
        memory = memoryview(bytearray(len(data)))
        cancelled = 0
        for turn in range(12):
            task = asyncio.create_task(store.read_into("file.bin", 0, memory))
            await asyncio.sleep(0.0004 * turn**2)
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                cancelled += 1
            mark = bytes([turn + 1]) * len(data)
            memory[:] = mark
            # Time for a writer that might still run: another read of the same bytes by the same means.
            assert await read(store, "file.bin", 0, len(data)) == data
            assert memory == mark
        assert cancelled > 0

    @runs()
    async def test_after_an_error_nobody_writes(self, store: Store) -> None:
        data = pattern(9 * MIB)
        await self.put(store, "file.bin", data)
        memory = memoryview(bytearray(len(data)))
        with pytest.raises(BootseerError):
            await store.read_into("file.bin", 1, memory)
        memory[:] = b"\xee" * len(data)
        assert await read(store, "file.bin", 0, len(data)) == data
        assert memory == b"\xee" * len(data)

    @runs()
    async def test_the_target_is_let_go(self, store: Store) -> None:
        """Memory such as a shared arena can be closed immediately afterwards."""
        await self.put(store, "file.bin", pattern(100_000))
        memory = bytearray(100_000)
        target = memoryview(memory)
        await store.read_into("file.bin", 0, target)
        with pytest.raises(Truncated):
            await store.read_into("file.bin", 1, target)
        target.release()
        memory.clear()  # BufferError while there is a view

    @runs()
    async def test_statistics(self, store: Store) -> None:
        names = {"requests", "read_bytes", "written_bytes", "retries"}
        assert names <= set(store.statistics())
        await self.put(store, "file.bin", pattern(50_000))
        before = store.statistics()
        await store.stat("file.bin")
        await read(store, "file.bin", 0, 50_000)
        await read(store, "file.bin", 100, 1000)
        after = store.statistics()
        assert after["requests"] >= before["requests"] + 3
        assert after["read_bytes"] == before["read_bytes"] + 51_000
        assert after["retries"] == before["retries"]

    @runs()
    async def test_closing_twice(self, make_store: MakeStore, store: Store) -> None:
        await self.put(store, "file.bin", b"x")
        other = make_store()
        await other.stat("file.bin")
        await other.aclose()
        await other.aclose()
        assert await read(store, "file.bin", 0, 1) == b"x", "other stores of the place go on"

    def test_has_a_url(self, store: Store) -> None:
        assert "://" in store.url
        assert not store.url.endswith("/")


class ReadOnlySuite:
    """Tests of stores that cannot write."""

    @runs()
    async def test_writing_is_refused(self, store: Store) -> None:
        calls: list[Awaitable[object]] = [
            store.publish("new.bin", b"x"),
            store.publish("new.bin", b"x", if_absent=True),
            store.concat("new.bin", ["a", "b"]),
            store.delete("new.bin"),
        ]
        for call in calls:
            with pytest.raises(StorageError, match="read"):
                await call
        with pytest.raises(StorageError, match="read"):
            async with store.create("new.bin") as writer:
                await writer.write(b"x")
        assert not store.features.creates_if_absent
        assert not store.features.concatenates


class StoreSuite(ReadingSuite):
    """Tests of stores that can be read and written."""

    has_directories: ClassVar[bool] = True  # else a missing directory is an empty one

    # ---- publish -------------------------------------------------------------------------------------------

    @runs()
    async def test_publish(self, store: Store) -> None:
        for data in (b"first", b"", b"second, longer", pattern(300_000)):
            found = await store.publish("some/folder/file.json", data)
            assert found == await store.stat("some/folder/file.json")
            assert await read(store, "some/folder/file.json", 0, len(data)) == data
        assert [entry.name for entry in await store.list("some/folder")] == ["file.json"], "nothing else is left"

    @runs()
    async def test_publish_if_absent(self, store: Store) -> None:
        found = await store.publish("folder/file.json", b"first", if_absent=True)
        assert found == await store.stat("folder/file.json")
        with pytest.raises(AlreadyExists) as caught:
            await store.publish("folder/file.json", b"second", if_absent=True)
        assert "file.json" in str(caught.value)
        assert await read(store, "folder/file.json", 0, 5) == b"first"
        assert [entry.name for entry in await store.list("folder")] == ["file.json"]

    @runs()
    async def test_one_of_many_publishes_if_absent(self, make_store: MakeStore, store: Store) -> None:
        writers = 12
        stores = [make_store() for _ in range(writers)]

        async def one(index: int, turn: int) -> int | None:
            try:
                await stores[index].publish(f"race/{turn}.json", pattern(2000, seed=index), if_absent=True)
            except AlreadyExists:
                return None
            return index

        for turn in range(4):
            winners = [
                index
                for index in await asyncio.gather(*[one(index, turn) for index in range(writers)])
                if index is not None
            ]
            assert winners
            found = await read(store, f"race/{turn}.json", 0, 2000)
            if store.features.creates_if_absent:
                assert len(winners) == 1
                assert found == pattern(2000, seed=winners[0])
            else:
                assert found in [pattern(2000, seed=index) for index in winners]
        for each in stores:
            await each.aclose()

    @runs()
    async def test_readers_see_one_version_whole(self, make_store: MakeStore, store: Store) -> None:
        size = 300_000
        await store.publish("file.json", b"\0" * size)
        is_over = asyncio.Event()

        async def write() -> None:
            other = make_store()
            for turn in range(1, 25):
                await other.publish("file.json", bytes([turn]) * size)
            await other.aclose()
            is_over.set()

        async def look() -> int:
            looks, last = 0, 0
            while not is_over.is_set() or looks == 0:
                data = await read(store, "file.json", 0, size)
                assert len(set(data)) == 1, "parts of two versions"
                assert data[0] >= last, "an older version after a newer one"
                last, looks = data[0], looks + 1
            return looks

        async with asyncio.TaskGroup() as group:
            group.create_task(write())
            for _ in range(3):
                group.create_task(look())
        assert await read(store, "file.json", 0, 1) == bytes([24])

    @runs()
    async def test_publish_of_what_was_staged(self, store: Store) -> None:
        await store.publish("folder/old.json", b"old")
        files = [("folder/old.json", b"new"), ("new.json", b"first"), ("new.json", b"second"), ("folder/no", b"x")]
        async with staged(store, files, folder="folder") as (old, first, second, _):
            assert [entry.name for entry in await store.list("folder")] == ["old.json"], "nobody sees it"
            assert await read(store, "folder/old.json", 0, 3) == b"old"
            await old.publish()
            await first.publish(if_absent=True)
            for _ in range(2):
                with pytest.raises(AlreadyExists):
                    await second.publish(if_absent=True)
            await first.discard()
        assert await read(store, "folder/old.json", 0, 3) == b"new"
        assert await read(store, "new.json", 0, 5) == b"first"
        assert [entry.name for entry in await store.list("folder")] == ["old.json"], "nothing else is left"

    # ---- create --------------------------------------------------------------------------------------------

    @runs()
    async def test_create(self, store: Store) -> None:
        data = pattern(3 * MIB + 11)
        async with store.create("new/folder/file.bin", size=len(data), placement=3) as writer:
            for start in range(0, len(data), 1_000_000):
                await writer.write(memoryview(data)[start : start + 1_000_000])
            assert not await is_there(store, "new/folder/file.bin"), "it appears at the end"
        assert (await store.stat("new/folder/file.bin")).size == len(data)
        assert await read(store, "new/folder/file.bin", 0, len(data)) == data
        assert [entry.name for entry in await store.list("new/folder")] == ["file.bin"]

    @runs()
    async def test_create_large(self, store: Store) -> None:
        data = pattern(36 * MIB + 1)
        async with store.create("large.bin") as writer:
            await writer.write(data[: 17 * MIB])
            await writer.write(memoryview(data)[17 * MIB :])
            assert not await is_there(store, "large.bin")
        assert await read(store, "large.bin", 0, len(data)) == data

    @runs()
    async def test_create_of_nothing(self, store: Store) -> None:
        async with store.create("empty.bin", size=0):
            pass
        async with store.create("empty2.bin") as writer:
            await writer.write(b"")
        assert (await store.stat("empty.bin")).size == (await store.stat("empty2.bin")).size == 0

    @runs()
    async def test_written_memory_may_be_used_again(self, store: Store) -> None:
        memory = bytearray(2 * MIB)
        async with store.create("file.bin") as writer:
            for turn in range(10):
                memory[:] = bytes([turn]) * len(memory)
                await writer.write(memoryview(memory))
                memory[:] = b"\xee" * len(memory)
        for turn in range(10):
            assert await read(store, "file.bin", turn * 2 * MIB, 2 * MIB) == bytes([turn]) * (2 * MIB)

    @runs()
    async def test_create_overwrites_nothing(self, store: Store) -> None:
        await store.publish("file.bin", b"old")
        with pytest.raises(AlreadyExists):
            async with store.create("file.bin") as writer:
                await writer.write(b"new")
        assert await read(store, "file.bin", 0, 3) == b"old"

    @runs()
    async def test_a_name_that_is_taken_meanwhile(self, make_store: MakeStore, store: Store) -> None:
        other = make_store()
        with pytest.raises(AlreadyExists):
            async with store.create("folder/file.bin") as writer:
                await writer.write(b"new")
                await other.publish("folder/file.bin", b"old")
        assert await read(store, "folder/file.bin", 0, 3) == b"old"
        assert [entry.name for entry in await store.list("folder")] == ["file.bin"]
        await other.aclose()

    @runs()
    async def test_an_error_leaves_nothing(self, store: Store) -> None:
        await store.publish("folder/other.bin", b"x")
        for size in (10, 18 * MIB):
            with pytest.raises(ZeroDivisionError):
                async with store.create("folder/file.bin", size=2 * size) as writer:
                    await writer.write(bytes(size))
                    raise ZeroDivisionError
            assert not await is_there(store, "folder/file.bin")
            assert [entry.name for entry in await store.list("folder")] == ["other.bin"]
        async with store.create("folder/file.bin") as writer:  # the name is free
            await writer.write(b"x")

    @runs()
    async def test_a_cancel_leaves_nothing(self, store: Store) -> None:
        await store.publish("folder/other.bin", b"x")
        is_writing = asyncio.Event()

        async def write() -> None:
            async with store.create("folder/file.bin") as writer:
                while True:
                    await writer.write(bytes(MIB))
                    is_writing.set()

        for turn in range(3):
            is_writing.clear()
            task = asyncio.create_task(write())
            await is_writing.wait()
            await asyncio.sleep(0.003 * turn)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert not await is_there(store, "folder/file.bin")
            assert [entry.name for entry in await store.list("folder")] == ["other.bin"]

    @runs()
    async def test_many_are_created_at_once(self, store: Store) -> None:
        async def one(index: int) -> None:
            async with store.create(f"many/{index:03}.bin", placement=index) as writer:
                for _ in range(4):
                    await writer.write(pattern(100_000, seed=index))

        async with asyncio.TaskGroup() as group:
            for index in range(16):
                group.create_task(one(index))
        assert [entry.name for entry in await store.list("many")] == [f"{index:03}.bin" for index in range(16)]
        for index in range(16):
            assert await read(store, f"many/{index:03}.bin", 100_000, 100_000) == pattern(100_000, seed=index)

    # ---- concat --------------------------------------------------------------------------------------------

    @runs()
    async def test_concat(self, store: Store) -> None:
        parts = []
        for index, size in enumerate((1000, 9 * MIB + 3, 1, 70_000)):
            parts.append(f"folder/part{index}")
            await self._write(store, parts[-1], pattern(size, seed=index))
        whole = b"".join(pattern(size, seed=index) for index, size in enumerate((1000, 9 * MIB + 3, 1, 70_000)))
        await store.concat("folder/whole.bin", parts)
        assert (await store.stat("folder/whole.bin")).size == len(whole)
        assert await read(store, "folder/whole.bin", 0, len(whole)) == whole
        assert [entry.name for entry in await store.list("folder")] == ["whole.bin"], "the parts are gone"

    @runs()
    async def test_concat_of_one_and_of_none(self, store: Store) -> None:
        await self._write(store, "part", b"abc")
        await store.concat("whole.bin", ["part"])
        assert await read(store, "whole.bin", 0, 3) == b"abc"
        assert not await is_there(store, "part")
        with pytest.raises(StorageError):
            await store.concat("none.bin", [])
        assert not await is_there(store, "none.bin")

    @runs()
    async def test_concat_that_cannot_be(self, store: Store) -> None:
        await self._write(store, "part", b"abc")
        await store.publish("old.bin", b"old")
        with pytest.raises(NotFound):
            await store.concat("whole.bin", ["part", "missing"])
        assert not await is_there(store, "whole.bin")
        with pytest.raises(AlreadyExists):
            await store.concat("old.bin", ["part"])
        assert await read(store, "old.bin", 0, 3) == b"old"
        assert await read(store, "part", 0, 3) == b"abc"

    # ---- list and delete -----------------------------------------------------------------------------------

    @runs()
    async def test_list(self, store: Store) -> None:
        names = [
            "b.bin",
            "a.bin",
            "B.bin",
            "ä.bin",
            "a b%20.bin",
            "10.bin",
            "9.bin",
            "z/below.bin",
            "z/y/x.bin",
            "c/d.bin",
        ]
        for name in names:
            await store.publish(f"top/{name}", name.encode())
        found = await store.list("top")
        assert all(isinstance(entry, Entry) for entry in found)
        expected = sorted({name.partition("/")[0] for name in names})
        assert [entry.name for entry in found] == expected
        for entry in found:
            assert entry.is_folder == (entry.name in ("z", "c"))
            assert entry.size == (0 if entry.is_folder else len(entry.name.encode()))
            assert entry.mtime_s == 0.0 or abs(entry.mtime_s - time.time()) < 86400
        assert [entry.name for entry in await store.list("top/z")] == ["below.bin", "y"]
        assert [(entry.name, entry.is_folder) for entry in await store.list("")] == [("top", True)]

    @runs()
    async def test_list_of_many(self, store: Store) -> None:
        async def one(index: int) -> None:
            await store.publish(f"many/{index}.bin", b"x")

        async with asyncio.TaskGroup() as group:
            for index in range(60):
                group.create_task(one(index))
        assert [entry.name for entry in await store.list("many")] == sorted(f"{index}.bin" for index in range(60))

    @runs()
    async def test_list_of_what_is_missing(self, store: Store) -> None:
        await store.publish("folder/file.bin", b"x")
        for directory in ("missing", "folder/missing", "fold"):
            if self.has_directories:
                with pytest.raises(NotFound):
                    await store.list(directory)
            else:
                assert await store.list(directory) == []

    @runs()
    async def test_list_of_an_empty_root(self, store: Store) -> None:
        assert await store.list("") == []

    @runs()
    async def test_delete(self, store: Store) -> None:
        for path in ("a/file.bin", "a/below/deep/file.bin", "a/below/two.bin", "ab/file.bin", "a.bin"):
            await store.publish(path, b"x")
        await store.delete("a/file.bin")
        assert not await is_there(store, "a/file.bin")
        assert await is_there(store, "a/below/two.bin")
        await store.delete("a")
        assert not await is_there(store, "a/below/deep/file.bin")
        assert not await is_there(store, "a/below/two.bin")
        assert [entry.name for entry in await store.list("")] == ["a.bin", "ab"], "names that begin alike stay"
        for path in ("a", "missing", "missing/below", "a.bin/below"):
            await store.delete(path)
        await store.delete("a.bin")
        await store.publish("a.bin", b"again")
        assert await read(store, "a.bin", 0, 5) == b"again"

    # ---- all writing ---------------------------------------------------------------------------------------

    @runs()
    async def test_writing_outside_the_root_is_refused(self, store: Store) -> None:
        await store.publish("a/b", b"x")
        for path in BAD_PATHS:
            calls: list[Awaitable[object]] = [
                store.publish(path, b"y"),
                store.publish(path, b"y", if_absent=True),
                store.concat(path, ["a/b"]),
                store.concat("c", [path]),
                store.delete(path),
            ]
            if path:
                calls.append(store.list(path))
            for call in calls:
                with pytest.raises(StorageError):
                    await call
            with pytest.raises(StorageError):
                async with store.create(path) as writer:
                    await writer.write(b"y")
        assert await read(store, "a/b", 0, 1) == b"x"
        assert not await is_there(store, "c")

    @runs()
    async def test_written_bytes_are_counted(self, store: Store) -> None:
        before = store.statistics()
        await store.publish("small.bin", bytes(1000))
        async with store.create("file.bin") as writer:
            await writer.write(bytes(200_000))
        assert store.statistics()["written_bytes"] == before["written_bytes"] + 201_000
        assert store.statistics()["requests"] > before["requests"]

    @runs()
    async def test_names_in_listings_open_files(self, store: Store) -> None:
        for name in NAMES:
            await store.publish(f"names/{name}", name.encode())
        found = await store.list("names")
        assert [entry.name for entry in found] == sorted(NAMES)
        for entry in found:
            assert await read(store, f"names/{entry.name}", 0, entry.size) == entry.name.encode()

    @staticmethod
    async def _write(store: Store, path: str, data: bytes) -> None:
        async with store.create(path, size=len(data)) as writer:
            await writer.write(data)
