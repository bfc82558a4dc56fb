"""A version from the store in the arena's place: nothing is delivered that was not verified."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.checkpoint.io.inputs import MemoryInput
from bootseer.checkpoint.io.source import Request
from bootseer.checkpoint.mounting import SourceFiles
from bootseer.checkpoint.opening import Job, open_job
from bootseer.checkpoint.versions.resolve import resolve
from bootseer.checkpoint.writing.writer import Geometry, write_version
from bootseer.errors import DigestMismatch
from bootseer.storage.local.store import LocalStore

UNIT_BYTES = 1 << 20


def make_damaged(directory: Path, arena: str) -> Job:
    """A version of eight units, each of which is damaged."""
    store = LocalStore(str(directory))
    files = [("model.bin", MemoryInput([os.urandom(8 * UNIT_BYTES)]))]
    aio.run_sync(write_version(store, "ckpt", files, geometry=Geometry(UNIT_BYTES, 2)))
    pinned = aio.run_sync(resolve(store, "ckpt"))
    for path in directory.rglob("*"):
        if path.is_file() and path.stat().st_size >= UNIT_BYTES:
            path.write_bytes(b"\xff" * path.stat().st_size)
    return Job("", str(directory / "ckpt"), pinned.striped_version, pinned.digest, arena)


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 4096), (UNIT_BYTES - 100, 200), (5 * UNIT_BYTES, UNIT_BYTES), (7, 3 * UNIT_BYTES)]
)
def test_a_part_of_a_damaged_unit_is_not_delivered_in_place_of_the_arena(
    tmp_path: Path, offset: int, length: int
) -> None:
    source = open_job(make_damaged(tmp_path, arena="/nowhere/socket"), None)
    target = bytearray(length)
    with pytest.raises(DigestMismatch, match=r"model.bin: unit \d is damaged"):
        source.read([Request("model.bin", offset, memoryview(target))])
    source.close()


def test_a_mount_without_an_arena_reads_whole_units(tmp_path: Path) -> None:
    source = open_job(make_damaged(tmp_path, arena=""), None)
    files = SourceFiles(source)
    assert [file.checked_bytes for file in files.files.values()] == [UNIT_BYTES]
    files.close()
