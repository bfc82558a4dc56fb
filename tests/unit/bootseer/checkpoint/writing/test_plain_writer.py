"""One ordinary file from parts: whole or not there, also when parts fail and at every step of a crash."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest

from bootseer import aio
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.writing import plain_writer
from bootseer.checkpoint.writing.plain_writer import write_plain
from bootseer.errors import AlreadyExists, NotFound, Truncated, Unavailable
from bootseer.storage.memory import MemoryStore
from bootseer.storage.protocol import Store
from tests.unit.bootseer.checkpoint.crashing import CrashingStore, Died, FailingStore

DATA = random.Random(3).randbytes(100_000)


class JoiningStore(MemoryStore):
    """As HDFS: it joins files."""

    features = MemoryStore.features._replace(concatenates=True)


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plain_writer, "STEP_BYTES", 4096)
    monkeypatch.setattr(plain_writer, "PART_BYTES", 10_000)


def new_store() -> JoiningStore:
    return JoiningStore(uuid.uuid4().hex)


def write(store: Store, data: bytes = DATA, **more: Any) -> None:
    aio.run_sync(write_plain(store, "folder/all.bin", MemoryInput([data[:777], data[777:]]), **more))


def read(store: Store, name: str = "folder/all.bin") -> bytes:
    data = bytearray(aio.run_sync(store.stat(name)).size)
    aio.run_sync(store.read_into(name, 0, memoryview(data)))
    return bytes(data)


def names(store: Store) -> list[str]:
    return [entry.name for entry in aio.run_sync(store.list("folder"))]


@pytest.mark.parametrize("size", [0, 1, 4096, 9_999, 20_000, 65_536, 100_000])
@pytest.mark.parametrize("parts", [None, 1, 3, 100])
def test_any_size_in_any_parts(size: int, parts: int | None) -> None:
    store, told = new_store(), [0]
    write(store, DATA[:size], parts=parts, progress=told.append)
    assert read(store) == DATA[:size]
    assert names(store) == ["all.bin"]
    assert sum(told) == size


def test_a_part_that_fails_is_written_under_another_name() -> None:
    inner = new_store()
    store = FailingStore(inner, 3)
    told = [0]
    write(store, progress=told.append)
    assert read(inner) == DATA
    assert len(set(store.names)) == len(store.names) == 7 + 3
    assert sum(told) == len(DATA)


def test_nothing_stays_of_what_fails() -> None:
    inner = new_store()
    with pytest.raises(Unavailable):
        write(FailingStore(inner, 1000))
    assert aio.run_sync(inner.list("")) == []


def test_a_name_that_is_taken_is_refused_before_anything_is_written() -> None:
    store = new_store()
    write(store, b"first")
    counting = FailingStore(store, 0)
    with pytest.raises(AlreadyExists, match="nothing was written"):
        write(counting)
    assert counting.names == [] and read(store) == b"first"


@pytest.mark.parametrize("is_done", [False, True])
def test_a_crash_at_any_step_leaves_the_whole_file_or_none(is_done: bool) -> None:
    seen = set()
    for after in range(10_000):
        inner = new_store()
        try:
            write(CrashingStore(inner, after, is_done=is_done))
        except Died:
            try:
                assert read(inner) == DATA
                seen.add(True)
            except NotFound:
                seen.add(False)
        else:
            break
    assert after > 20
    assert seen == ({False, True} if is_done else {False})


class ShortStore(JoiningStore):
    """Loses the end of what is written, and says nothing."""

    def _put(self, path: str, data: bytes, *, is_new: bool) -> Any:
        return super()._put(path, data[:-1], is_new=is_new)


@pytest.mark.parametrize("parts", [1, 4])
def test_a_wrong_size_is_seen(parts: int) -> None:
    store = ShortStore(uuid.uuid4().hex)
    with pytest.raises(Truncated, match="were written"):
        write(store, parts=parts)
    assert aio.run_sync(store.list("")) == []
