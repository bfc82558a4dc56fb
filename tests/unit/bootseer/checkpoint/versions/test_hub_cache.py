"""The cache folder of a model of the hub: its snapshot is loaded, and no byte twice."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer import aio
from bootseer.checkpoint import load_file
from bootseer.checkpoint.service.rank_paths import own_path
from bootseer.checkpoint.versions.resolve import Pinned, pin, resolve
from bootseer.storage.local.store import LocalStore
from tests.unit.bootseer.checkpoint.format.test_as_safetensors import T, file_of

WEIGHTS = file_of(f'{{"a":{T}}}', 4)


def cache(tmp_path: Path, *revisions: str, main: str = "") -> Path:
    root = tmp_path / "models--org--name"
    for revision in revisions:
        (root / "blobs").mkdir(parents=True, exist_ok=True)
        (root / "snapshots" / revision).mkdir(parents=True)
        for name, data in (("model.safetensors", WEIGHTS), ("config.json", b"{}")):
            blob = root / "blobs" / f"{revision}{len(data)}"
            blob.write_bytes(data)
            (root / "snapshots" / revision / name).symlink_to(f"../../blobs/{blob.name}")
    if main:
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(main)
    return root


def found(root: Path) -> Pinned:
    pinned = aio.run_sync(resolve(LocalStore(str(root.parent)), root.name))
    again = aio.run_sync(pin(LocalStore(str(root.parent)), root.name, pinned.version, pinned.digest))
    assert again == pinned
    aio.close()
    return pinned


@pytest.mark.parametrize(("main", "expected"), [("aaaa", "aaaa"), ("", "bbbb"), ("of another time", "bbbb")])
def test_the_snapshot(main: str, expected: str, tmp_path: Path) -> None:
    root = cache(tmp_path, "aaaa", main=main)

    os.utime(root / "snapshots" / "aaaa", (1, 1))
    cache(tmp_path, "bbbb")
    pinned = found(root)
    assert pinned.version == f"snapshots/{expected}"
    assert [file.path for file in pinned.files] == ["config.json", "model.safetensors"]
    assert Path(own_path(str(root), pinned.version), "model.safetensors").read_bytes() == WEIGHTS


def test_loaders_read_it_once(tmp_path: Path) -> None:
    root = cache(tmp_path, "aaaa", main="aaaa")
    assert list(load_file(str(root))) == ["a"]
    assert list(load_file(str(root / "snapshots" / "aaaa"))) == ["a"]
    aio.close()


def test_a_directory_that_has_one_of_the_names_is_none(tmp_path: Path) -> None:
    directory = tmp_path / "ckpt" / "snapshots"
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(WEIGHTS)
    assert found(tmp_path / "ckpt").version == ""
