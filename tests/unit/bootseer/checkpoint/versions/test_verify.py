"""Every fault of a version is found and named; copies are equal, or not there."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from bootseer import aio
from bootseer.checkpoint.convert import stripe_version, unstripe_version
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.versions.resolve import Pinned, resolve
from bootseer.checkpoint.versions.verify import VerifyResult, verify
from bootseer.checkpoint.writing import writer as writing
from bootseer.checkpoint.writing.writer import Geometry, write_version
from bootseer.errors import AlreadyExists, DigestMismatch
from bootseer.storage.memory import MemoryStore
from bootseer.storage.protocol import Store

DATA = {"a.bin": bytes(range(256)) * 100, "sub/b.bin": b"b" * 5000}


@pytest.fixture(autouse=True)
def _stripe_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "UNSTRIPED_BELOW_BYTES", 10_000)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore(uuid.uuid4().hex)


def save(store: Store) -> Pinned:
    sources = [(path, MemoryInput([data])) for path, data in DATA.items()]
    return aio.run_sync(write_version(store, "ckpt", sources, geometry=Geometry(4096, 3), step=7))


def check(store: Store, pinned: Pinned) -> VerifyResult:
    told: list[int] = []
    verdict = aio.run_sync(verify(store, pinned, told.append))
    assert sum(told) == pinned.size
    return verdict


def read(store: Store, name: str) -> bytes:
    data = bytearray(aio.run_sync(store.stat(name)).size)
    aio.run_sync(store.read_into(name, 0, memoryview(data)))
    return bytes(data)


def test_a_right_version(store: MemoryStore) -> None:
    assert check(store, save(store)) == VerifyResult(2, 30_600, 0, (), 0)


def test_each_fault_is_named(store: MemoryStore) -> None:
    pinned = save(store)
    first, second, third = pinned.files[0].stripes
    data = bytearray(read(store, first))
    data[4096 + 5] ^= 1  # unit 3
    aio.run_sync(store.publish(first, bytes(data)))
    aio.run_sync(store.publish(second, read(store, second)[:-1]))
    aio.run_sync(store.delete(third))
    verdict = check(store, pinned)
    assert [(each.path, each.stripe, each.unit) for each in verdict.faults] == [
        ("a.bin", first, 3),
        ("a.bin", second, -1),
        ("a.bin", second, 4),
        ("a.bin", third, -1),
    ]
    assert verdict.fault_count == 4
    assert "CRC32C" in verdict.faults[0].what and "has 8191 bytes, not 8192" in verdict.faults[1].what


def test_there_and_back(store: MemoryStore) -> None:
    other = MemoryStore(uuid.uuid4().hex)
    plain = aio.run_sync(unstripe_version(store, save(store), other, "plain"))
    assert {name: read(other, name) for name in plain} == {f"plain/{path}": data for path, data in DATA.items()}
    with pytest.raises(AlreadyExists, match="nothing was written"):
        aio.run_sync(unstripe_version(store, save(store), other, "plain"))
    pinned = aio.run_sync(resolve(other, "plain"))
    assert check(other, pinned) == VerifyResult(2, 0, 30_600, (), 0)
    back = aio.run_sync(stripe_version(other, pinned, store, "again", geometry=Geometry(8192, 2)))
    assert {file.path: file.layout.size for file in back.files} == {path: len(data) for path, data in DATA.items()}
    assert check(store, back).fault_count == 0


def test_a_damaged_version_is_not_copied(store: MemoryStore) -> None:
    pinned = save(store)
    name = pinned.files[1].stripes[0]
    aio.run_sync(store.publish(name, b"x" * 5000))
    other: Any = MemoryStore(uuid.uuid4().hex)
    with pytest.raises(DigestMismatch, match=r"sub/b.bin: unit 0 is damaged"):
        aio.run_sync(stripe_version(store, pinned, other, "copy"))
    assert aio.run_sync(other.list("")) == []
