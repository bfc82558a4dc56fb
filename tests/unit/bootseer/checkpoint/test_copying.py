"""Copies of versions: every unit is checked on the way, whatever steps the copy is made in."""

from __future__ import annotations

import random
import uuid
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bootseer import aio
from bootseer.checkpoint.convert import stripe_version, unstripe_version
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.versions.resolve import Pinned
from bootseer.checkpoint.versions.verify import verify
from bootseer.checkpoint.versions.version_input import inputs_of
from bootseer.checkpoint.writing import plain_writer, writer
from bootseer.checkpoint.writing.writer import Geometry, write_version
from bootseer.errors import DigestMismatch, Truncated, Unavailable
from bootseer.storage.memory import MemoryStore
from bootseer.storage.protocol import Store
from tests.unit.bootseer.checkpoint.crashing import FailingStore

DATA = random.Random(5).randbytes(150_000)


@pytest.fixture(autouse=True)
def _small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "UNSTRIPED_BELOW_BYTES", 10_000)
    monkeypatch.setattr(plain_writer, "STEP_BYTES", 10_240)


def new_store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def save(store: Store, geometry: Geometry, data: bytes = DATA) -> Pinned:
    return aio.run_sync(write_version(store, "ckpt", [("f", MemoryInput([data]))], geometry=geometry))


def read(store: Store, name: str) -> bytes:
    data = bytearray(aio.run_sync(store.stat(name)).size)
    aio.run_sync(store.read_into(name, 0, memoryview(data)))
    return bytes(data)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 150_000), st.sampled_from([4096, 8192, 12288, 65536]), st.integers(1, 4), st.data(),
)  # fmt: skip
def test_any_range_is_that_of_the_file(size: int, unit: int, stripes: int, data: st.DataObject) -> None:
    store = new_store()
    [(_, source)] = inputs_of(store, save(store, Geometry(unit, stripes), DATA[:size]))
    assert source.size == size
    ranges = []
    for _ in range(5):
        start = data.draw(st.integers(0, size))
        ranges.append((start, data.draw(st.integers(start, size))))

    async def read_all() -> list[bytes]:
        async def read_one(where: tuple[int, int]) -> bytes:
            target = bytearray(where[1] - where[0])
            await source.read_into(where[0], memoryview(target))
            return bytes(target)

        return await aio.map_bounded(read_one, ranges, width=5)

    assert aio.run_sync(read_all()) == [DATA[start:end] for start, end in ranges]


def test_past_the_end() -> None:
    store = new_store()
    [(_, source)] = inputs_of(store, save(store, Geometry(4096)))
    with pytest.raises(Truncated):
        aio.run_sync(source.read_into(len(DATA) - 1, memoryview(bytearray(2))))


@pytest.mark.parametrize("place", [0, 8_191, 70_001, len(DATA) - 1])
@pytest.mark.parametrize("to_unit", [4096, 8192, 65536, None])
def test_a_flipped_bit_never_gets_through(to_unit: int | None, place: int) -> None:
    """From units of 8 KiB, 64 KiB and others, in steps that do not fit them."""
    for unit in (8192, 12288, 65536):
        store, other = new_store(), new_store()
        pinned = save(store, Geometry(unit))
        [name] = pinned.files[0].stripes
        damaged = bytearray(read(store, name))
        damaged[place] ^= 4
        aio.run_sync(store.publish(name, bytes(damaged)))
        with pytest.raises(DigestMismatch, match=f"unit {place // unit} is damaged"):
            if to_unit is None:
                aio.run_sync(unstripe_version(store, pinned, other, ""))
            else:
                aio.run_sync(stripe_version(store, pinned, other, "", geometry=Geometry(to_unit)))
        assert aio.run_sync(other.list("")) == []


def test_a_copy_in_small_units_reads_large_ones_once() -> None:
    store, other = new_store(), new_store()
    pinned = save(store, Geometry(65536))
    before = store.statistics()["read_bytes"]
    copy = aio.run_sync(stripe_version(store, pinned, other, "", geometry=Geometry(4096, 3)))
    assert store.statistics()["read_bytes"] - before == len(DATA)
    assert aio.run_sync(verify(other, copy)).fault_count == 0


def test_nothing_stays_of_an_unstriping_that_fails() -> None:
    store, other = new_store(), new_store()
    sources = [(f"{number}.bin", MemoryInput([DATA])) for number in range(10)]
    pinned = aio.run_sync(write_version(store, "ckpt", sources, geometry=Geometry(4096)))

    class FailingLate(FailingStore):
        def create(self, path: str, **more: Any) -> Any:
            self.failures = int(path == "out/7.bin")
            return super().create(path, **more)

    with pytest.raises(Unavailable):
        aio.run_sync(unstripe_version(store, pinned, FailingLate(other, 0), "out"))
    assert aio.run_sync(other.list("")) == []
