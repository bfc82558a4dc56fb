"""`ckpt stripe --stripes N`: as many stripe files as were asked for, or it is told why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer import aio
from bootseer.checkpoint import convert
from bootseer.checkpoint.versions.resolve import resolve
from bootseer.storage.local.store import LocalStore


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "plain"
    directory.mkdir()
    for name, units in (("large.bin", 9), ("middle.bin", 3), ("config.txt", 1)):
        (directory / name).write_bytes(b"\1" * (4096 * units - 5))
    return directory


def stripes(tmp_path: Path) -> dict[str, int]:
    pinned = aio.run_sync(resolve(LocalStore(str(tmp_path)), "ckpt"))
    aio.close()
    return {file.path: len(file.stripes) for file in pinned.files}


def test_so_many_as_were_asked_for(source: Path, tmp_path: Path) -> None:
    done = convert.stripe(str(source), str(tmp_path / "ckpt"), unit_bytes=4096, stripes=4)
    assert stripes(tmp_path) == {"large.bin": 4, "middle.bin": 3, "config.txt": 1}
    assert done.fewer == 2
    done = convert.stripe(str(source / "large.bin"), str(tmp_path / "ckpt"), unit_bytes=4096, stripes=9)
    assert (stripes(tmp_path), done.fewer) == ({"large.bin": 9}, 0)


def test_by_default_small_files_stay_whole(source: Path, tmp_path: Path) -> None:
    done = convert.stripe(str(source), str(tmp_path / "ckpt"), unit_bytes=4096)
    assert set(stripes(tmp_path).values()) == {1} and done.fewer == 0
