"""Versions are written whole or not at all: through crashes, failures, other writers, and damage that is found."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer import aio
from bootseer.checkpoint.format.manifest import MANIFEST_NAME
from bootseer.checkpoint.io.direct import FULL, DirectSource
from bootseer.checkpoint.io.inputs import FileInput, MemoryInput, Stream
from bootseer.checkpoint.io.source import Request
from bootseer.checkpoint.versions.resolve import Pinned, list_versions, pin, resolve
from bootseer.checkpoint.writing import writer as writing
from bootseer.checkpoint.writing.writer import (
    Geometry,
    VersionWriter,
    collect_garbage,
    new_version,
    write_plain,
    write_version,
)
from bootseer.errors import (
    BootseerError,
    CheckpointError,
    IntegrityError,
    NotFound,
    PermissionDenied,
    SourceChanged,
    Unavailable,
)
from bootseer.storage.local.store import LocalStore
from bootseer.storage.memory import MemoryStore
from bootseer.storage.protocol import Store
from tests.testing.faulty_store import Fault, FaultyStore, Kind
from tests.unit.bootseer.checkpoint.crashing import CrashingStore, Died, FailingStore, StagingStore

SMALL = Geometry(unit_bytes=4096, stripes=3)


@pytest.fixture(autouse=True)
def _stripe_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "UNSTRIPED_BELOW_BYTES", 10_000)


def content(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def new_store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def save(store: Store, files: dict[str, bytes], **more: Any) -> Pinned:
    sources = [(path, MemoryInput([data])) for path, data in files.items()]
    return aio.run_sync(write_version(store, "ckpt", sources, geometry=SMALL, **more))


def read_back(store: Store, pinned: Pinned) -> dict[str, bytes]:
    source = DirectSource(store.url, {file.path: file for file in pinned.files}, lambda: store, verify=FULL)
    targets = {path: bytearray(file.size) for path, file in source.files.items()}
    source.read([Request(path, 0, memoryview(target)) for path, target in targets.items()])
    return {path: bytes(target) for path, target in targets.items()}


def newest(store: Store) -> dict[str, bytes]:
    return read_back(store, aio.run_sync(resolve(store, "ckpt")))


FILES = {"model.bin": content(50_000), "small/opt.bin": content(5_000, 1), "empty": b""}


@pytest.fixture(params=["memory", "local"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Store:
    return new_store() if request.param == "memory" else LocalStore(str(tmp_path))


def test_what_was_saved_is_read(store: Store) -> None:
    pinned = save(store, FILES, step=20)
    assert newest(store) == FILES
    assert (pinned.step, pinned.size) == (20, 55_000)
    assert {file.path: len(file.stripes) for file in pinned.files} == {
        "model.bin": 3,
        "small/opt.bin": 1,
        "empty": 1,
    }
    assert aio.run_sync(pin(store, "ckpt", pinned.version, pinned.digest)) == pinned
    assert aio.run_sync(resolve(store, pinned.folder)) == pinned
    with pytest.raises(SourceChanged):
        aio.run_sync(pin(store, "ckpt", pinned.version, "0" * 64))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 60_000), st.sampled_from([4096, 8192, 12288]), st.integers(1, 7), st.booleans())
def test_any_size_and_geometry(size: int, unit_bytes: int, stripes: int, as_stream: bool) -> None:
    store, data = new_store(), content(size, size)

    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, size, 3000):
            yield data[at : at + 3000]

    source = Stream(chunks()) if as_stream else MemoryInput([data[: size // 3], data[size // 3 :]])
    aio.run_sync(write_version(store, "ckpt", [("f", source)], geometry=Geometry(unit_bytes, stripes)))
    assert newest(store) == {"f": data}


def test_files_of_this_machine(store: Store, tmp_path: Any) -> None:
    path = tmp_path / "source.bin"
    path.write_bytes(content(30_000))
    source = FileInput(str(path))
    aio.run_sync(write_version(store, "ckpt", [("f", source)], geometry=SMALL))
    source.close()
    assert newest(store) == {"f": content(30_000)}
    changed = FileInput(str(path))
    path.write_bytes(b"x")
    with pytest.raises(BootseerError):
        aio.run_sync(write_version(store, "ckpt", [("f", changed)], geometry=SMALL))
    with pytest.raises(SourceChanged):
        changed.close()
    assert newest(store) == {"f": content(30_000)}


@pytest.mark.parametrize("keep", [None, 1])
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("kind", [CrashingStore, StagingStore])
def test_a_crash_at_any_step_leaves_the_old_version_or_the_new_one(
    kind: type[CrashingStore], is_done: bool, keep: int | None
) -> None:
    new = {path: data[::-1] for path, data in FILES.items()}
    seen = set()
    for after in range(10_000):
        inner = new_store()
        save(inner, FILES)
        crashing = kind(inner, after, is_done=is_done)
        try:
            save(crashing, new, keep=keep)
        except Died:
            found = newest(inner)
            assert found in (FILES, new)
            seen.add(found == new)
            # The next save works, and is the newest one.
            save(inner, {"next": b"1"})
            assert newest(inner) == {"next": b"1"}
        else:
            break
    assert after > 15
    assert seen == {False, True}


def test_flipped_bits_are_found() -> None:
    """1,000 random places of stripe files and manifests (sums among them)."""
    store = new_store()
    pinned = save(store, FILES)
    names = [stripe for file in pinned.files for stripe in file.stripes] + [f"{pinned.folder}/{MANIFEST_NAME}"]
    stored = {name: aio.run_sync(read_all(store, name)) for name in names}
    where = [(name, place) for name, data in stored.items() for place in range(len(data))]
    manifest_places = [each for each in where if each[0].endswith(MANIFEST_NAME)]
    chance = random.Random(7)
    for name, place in chance.choices(where, k=700) + chance.choices(manifest_places, k=300):
        damaged = bytearray(stored[name])
        damaged[place] ^= 1 << chance.randrange(8)
        aio.run_sync(store.publish(name, bytes(damaged)))
        with pytest.raises(IntegrityError):
            newest(store)
        aio.run_sync(store.publish(name, stored[name]))
    assert newest(store) == FILES


async def read_all(store: Store, name: str) -> bytes:
    data = bytearray((await store.stat(name)).size)
    await store.read_into(name, 0, memoryview(data))
    return bytes(data)


def test_a_truncated_stripe_is_found() -> None:
    store = new_store()
    pinned = save(store, FILES)
    name = pinned.files[1].stripes[0]
    aio.run_sync(store.publish(name, aio.run_sync(read_all(store, name))[:-1]))
    with pytest.raises(IntegrityError):
        newest(store)


def test_writers_at_the_same_time_do_not_meet() -> None:
    store = new_store()

    async def save_one(number: int) -> Pinned:
        return await write_version(store, "ckpt", [("f", MemoryInput([content(20_000, number)]))], geometry=SMALL)

    async def save_all() -> list[Pinned]:
        return await aio.map_bounded(save_one, range(6), width=6)

    for number, pinned in enumerate(aio.run_sync(save_all())):
        assert read_back(store, pinned) == {"f": content(20_000, number)}
    assert len(aio.run_sync(list_versions(store, "ckpt"))) == 6


def test_a_version_sorts_after_those_of_clocks_ahead() -> None:
    store = new_store()
    ahead = f"{2**63:020d}-" + "0" * 12
    aio.run_sync(store.publish(f"ckpt/v-{ahead}/00000.s000", b""))
    assert aio.run_sync(new_version(store, "ckpt")) > ahead


def test_a_stripe_that_fails_is_written_under_another_name() -> None:
    inner = new_store()
    store = FailingStore(inner, 2)
    told: list[int] = []
    save(store, FILES, progress=told.append)
    assert newest(inner) == FILES
    assert len(set(store.names)) == len(store.names) == 7
    assert sum(told) == 55_000


def test_a_store_that_goes_on_failing_leaves_nothing() -> None:
    inner = new_store()
    with pytest.raises(Unavailable):
        save(FailingStore(inner, 1000), FILES)
    with pytest.raises(NotFound):
        newest(inner)
    assert aio.run_sync(list_versions(inner, "ckpt")) == []


class MeteredStore(MemoryStore):
    """Counts files that are being written."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.writers = self.max_writers = 0

    @asynccontextmanager
    async def create(self, path: str, **more: Any) -> AsyncIterator[Any]:
        self.writers += 1
        self.max_writers = max(self.max_writers, self.writers)
        try:
            async with super().create(path, **more) as writer:
                yield writer
        finally:
            self.writers -= 1


def test_memory_and_open_files_are_bounded() -> None:
    store = MeteredStore(uuid.uuid4().hex)
    writer = VersionWriter(store, "ckpt", "0" * 20 + "-" + "a" * 12, geometry=SMALL, buffer_bytes=5 * 4096)
    taken: list[int] = []
    take = writer._buffers.take

    async def count() -> memoryview:
        buffer = await take()
        taken.append(id(buffer))
        return buffer

    writer._buffers.take = count  # type: ignore[method-assign]

    async def chunks(number: int) -> AsyncIterator[bytes]:
        for at in range(0, 50_000, 7_000):
            yield content(50_000, number)[at : min(50_000, at + 7_000)]

    async def add(number: int) -> None:
        source = Stream(chunks(number)) if number % 2 else MemoryInput([content(50_000, number)])
        await writer.add(f"{number}", source)

    async def run() -> Pinned:
        await aio.map_bounded(add, range(20), width=20)
        return await writing.commit(store, "ckpt", writer.version, writer.files)

    pinned = aio.run_sync(run())
    assert read_back(store, pinned) == {f"{number}": content(50_000, number) for number in range(20)}
    assert len(set(taken)) <= 5 and len(taken) == 20 * 13
    assert store.max_writers <= writing.STRIPES_AT_ONCE


def test_a_stream_that_ends_in_an_error_leaves_nothing() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield content(30_000)
        raise Unavailable("its source is gone")

    for store in (new_store(), FailingStore(new_store(), 1000)):
        with pytest.raises(Unavailable):
            aio.run_sync(write_version(store, "ckpt", [("f", Stream(chunks()))], geometry=SMALL))
        assert aio.run_sync(list_versions(store, "ckpt")) == []


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_save_that_is_cancelled_leaves_nothing(store: Store, is_stream: bool) -> None:
    save(store, {"old": b"1"})

    async def run() -> None:
        written = asyncio.Event()

        async def chunks() -> AsyncIterator[bytes]:
            yield content(30_000)
            await asyncio.Event().wait()

        class Hanging(MemoryInput):
            async def read_into(self, offset: int, target: memoryview) -> None:
                if offset:
                    await asyncio.Event().wait()

        source = Stream(chunks()) if is_stream else Hanging([content(30_000)])
        saving = write_version(store, "ckpt", [("f", source)], geometry=SMALL, progress=lambda _: written.set())
        task = asyncio.create_task(saving)
        await written.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    aio.run_sync(run())
    assert newest(store) == {"old": b"1"}
    assert len(aio.run_sync(list_versions(store, "ckpt"))) == 1


def test_old_versions_and_leftovers_are_taken_away() -> None:
    store = new_store()
    for number in range(4):
        save(store, {"f": bytes([number])})
    old = f"{1:020d}-" + "a" * 12
    aio.run_sync(store.publish(f"ckpt/v-{old}/00000.s000", b"left"))
    fresh = aio.run_sync(new_version(store, "ckpt"))
    aio.run_sync(store.publish(f"ckpt/v-{fresh}/00000.s000", b"being written"))
    soon = [found.version for found in aio.run_sync(list_versions(store, "ckpt"))]
    gone = aio.run_sync(collect_garbage(store, "ckpt", keep=2, now_s=2.0))
    assert gone == soon[1:3] and old in soon  # nothing is a day old at that time
    assert aio.run_sync(collect_garbage(store, "ckpt", keep=2, now_s=1e10)) == [old, fresh]
    assert newest(store) == {"f": b"\3"}
    with pytest.raises(CheckpointError):
        aio.run_sync(collect_garbage(store, "ckpt", keep=0))


@pytest.mark.parametrize("error", [Unavailable, PermissionDenied])
def test_a_save_is_complete_although_old_versions_cannot_be_deleted(
    error: type[BootseerError], capsys: pytest.CaptureFixture[str]
) -> None:
    store = FaultyStore(new_store(), [Fault(Kind.ERROR, "delete", error=error)])
    first, second = (save(store, {"f": data}, keep=1).version for data in (b"1", b"2"))
    assert newest(store) == {"f": b"2"}
    assert [found.version for found in aio.run_sync(list_versions(store, "ckpt"))] == [first, second]
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("bootseer: warning: old checkpoint versions not deleted: delete ckpt/v-")
    store.plan.clear()
    third = save(store, {"f": b"3"}, keep=1).version
    assert [found.version for found in aio.run_sync(list_versions(store, "ckpt"))] == [third]
    assert capsys.readouterr().err == ""


def test_a_wrong_number_of_versions_is_refused_before_anything_is_written() -> None:
    store = FaultyStore(new_store())
    with pytest.raises(CheckpointError, match="keep 0"):
        save(store, {"f": b"1"}, keep=0)
    assert store.calls == []


def test_several_processes_write_one_version() -> None:
    store = new_store()

    async def run() -> Pinned:
        version = await new_version(store, "ckpt")
        files = []
        for rank in range(2):
            writer = VersionWriter(store, "ckpt", version, geometry=SMALL, prefix=f"r{rank:05d}-")
            files.append(await writer.add(f"rank{rank}.bin", MemoryInput([content(12_000, rank)])))
        return await writing.commit(store, "ckpt", version, files, step=3)

    assert read_back(store, aio.run_sync(run())) == {f"rank{rank}.bin": content(12_000, rank) for rank in range(2)}


@pytest.mark.parametrize("name", ["../x", "/x", "", "a\0b"])
def test_names_that_leave_the_checkpoint_are_refused(name: str) -> None:
    with pytest.raises(CheckpointError):
        save(new_store(), {name: b"x"})


def test_a_plain_file(store: Store) -> None:
    aio.run_sync(write_plain(store, "all.bin", MemoryInput([content(100_000)])))
    assert aio.run_sync(read_all(store, "all.bin")) == content(100_000)
    pinned = aio.run_sync(resolve(store, "all.bin"))
    assert [file.path for file in pinned.files] == ["all.bin"]
    assert read_back(store, pinned) == {"all.bin": content(100_000)}
