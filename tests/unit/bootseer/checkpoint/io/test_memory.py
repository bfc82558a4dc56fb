"""Memory for loads: aligned, private, refused when there is not enough; and local files that cannot be mapped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from bootseer.checkpoint import load_file, load_pt
from bootseer.checkpoint.io import local_source, memory
from bootseer.checkpoint.io.memory import HUGE_PAGE_BYTES, PAGE_BYTES, allocate, place
from bootseer.checkpoint.opening import open_source
from bootseer.errors import CheckpointError, StorageError
from bootseer.linux.cgroups import Memory
from bootseer.storage.engine.revocable_buffer import address_of
from tests.unit.bootseer.checkpoint.sources import noise, put


@pytest.mark.parametrize(
    "size", [0, 1, 100, 40_000, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 5 * HUGE_PAGE_BYTES + 7]
)
def test_areas(size: int) -> None:
    area = allocate(size)
    assert len(area) == size
    assert not any(area[:100])
    if size >= memory.SMALL_BYTES:
        assert address_of(area) % PAGE_BYTES == 0
    if size >= HUGE_PAGE_BYTES:
        assert address_of(area) % HUGE_PAGE_BYTES == 0
    if size:
        area[-1] = 5
        assert area[-1] == 5


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_places_keep_the_position_in_a_page(after: int, offset: int) -> None:
    at = place(after, offset)
    assert at % PAGE_BYTES == offset % PAGE_BYTES
    assert after <= at < after + PAGE_BYTES


def test_too_little_memory_is_said_before(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = tmp_path / "m.safetensors"
    save_file({"a": torch.zeros(3 << 20)}, data)
    put("memory://too-large", {"m.safetensors": data.read_bytes()})
    torch.save({"a": torch.zeros(3 << 20)}, tmp_path / "m.pt")
    put("memory://too-large", {"m.pt": (tmp_path / "m.pt").read_bytes()})
    tight = Memory(1 << 30, 5 << 20, "the cgroup /job")
    monkeypatch.setattr(memory, "read_memory", lambda: tight)
    for load, name in ((load_file, "m.safetensors"), (load_pt, "m.pt")):
        with pytest.raises(CheckpointError, match=r"12\.0 MiB of memory and the cgroup /job has 5\.0 MiB free"):
            load(f"memory://too-large/{name}")  # type: ignore[operator]
    monkeypatch.setattr(local_source, "read_memory", lambda: tight)
    assert load_file(data)["a"].numel() == 3 << 20  # mapped: the kernel may drop its pages again


@pytest.mark.parametrize("why", ["network file system", "old kernel"])
def test_what_cannot_be_mapped_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, why: str) -> None:
    if why == "old kernel":
        monkeypatch.setattr(local_source, "populate", lambda *_: False)
        monkeypatch.setattr(local_source, "_is_warm", lambda *_: False)
    else:
        monkeypatch.setattr(local_source, "is_remote", lambda _: True)
    wanted = {"a": torch.randn(3_000_000), "b": torch.arange(7)}
    save_file(wanted, tmp_path / "m.safetensors")
    found = load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_disk_that_fails_is_an_error_and_no_crash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> bool:
        raise StorageError("the disk or file system failed while the file was read: Input/output error")

    (tmp_path / "x").write_bytes(noise(5 << 20))
    monkeypatch.setattr(local_source, "populate", fail)
    monkeypatch.setattr(local_source, "_is_warm", lambda *_: False)
    with open_source(tmp_path / "x") as opened, pytest.raises(StorageError, match=r"x: the disk .*Input/output"):
        opened.source.map("x", 0, 5 << 20)


def test_populate_tells_what_the_kernel_says(tmp_path: Path) -> None:
    import mmap

    from bootseer.checkpoint.io.populate import populate

    (tmp_path / "x").write_bytes(noise(3 << 20))
    with (tmp_path / "x").open("rb") as file:
        area = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        start = address_of(memoryview(area))
        assert populate(file.fileno(), start, 5, (3 << 20) - 5)
        os.truncate(tmp_path / "x", 1 << 20)
        with pytest.raises(StorageError, match="failed while the file was read"):
            populate(file.fileno(), start, 0, 3 << 20)
