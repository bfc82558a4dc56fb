"""load_pt gives what torch.load gives, as views, and runs no code of a file unless it is told to."""

from __future__ import annotations

import io
import os
import random
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from bootseer.checkpoint import load_pt, pt
from bootseer.errors import BootseerError, CheckpointError, IntegrityError, NotFound
from tests.unit.bootseer.checkpoint.sources import put, stripe


def saved(value: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def state() -> dict[str, Any]:
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "model": OrderedDict(
            a=base, b=torch.randn(5, 3).to(torch.bfloat16), empty=torch.empty(0), s=torch.tensor(3)
        ),
        "tied": base,
        "view": base[1:3, ::2],
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "sparse": torch.eye(3).to_sparse(),
        "step": 5,
        "names": ["x", ("y", None, 2.5)],
    }


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert torch.equal(found.to_dense(), wanted.to_dense())
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_same(found[key], wanted[key])
    else:
        assert found == wanted


@pytest.mark.parametrize("url", ["{}", "memory://pt-{}", "striped", "memory://striped"])
def test_gives_what_torch_gives(tmp_path: Path, url: str) -> None:
    directory = (
        url.format(tmp_path.name if "memory" in url else tmp_path) if "{}" in url else f"{url}-{tmp_path.name}"
    )
    directory = directory if "memory" in url else str(tmp_path / "folder")
    data = saved(state())
    (stripe if "striped" in url else put)(directory, {"model.pt": data})
    found = load_pt(f"{directory}/model.pt")
    assert_same(found, torch.load(io.BytesIO(data), weights_only=True))
    assert found["tied"].data_ptr() == found["model"]["a"].data_ptr()
    assert found["view"].untyped_storage().data_ptr() == found["tied"].untyped_storage().data_ptr()
    assert_same(load_pt(directory), found)  # the only file
    found["tied"].zero_()
    assert not torch.equal(load_pt(directory)["tied"], found["tied"])


def test_tensors_are_views_and_live_on(tmp_path: Path) -> None:
    torch.save({"x": torch.arange(1000), "y": torch.arange(10)}, tmp_path / "m.pt")
    found = load_pt(tmp_path / "m.pt")
    distance = found["y"].data_ptr() - found["x"].data_ptr()
    assert 8000 <= distance < 9000  # as they lie in the file
    os.unlink(tmp_path / "m.pt")
    assert torch.equal(found["x"], torch.arange(1000))


def test_older_and_foreign_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = {"x": torch.arange(6.0)}
    legacy = saved(wanted, _use_new_zipfile_serialization=False)
    (tmp_path / "legacy.pt").write_bytes(legacy)
    assert_same(load_pt(tmp_path / "legacy.pt"), wanted)
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved(wanted))) as old,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    (tmp_path / "packed.pt").write_bytes(packed.getvalue())
    assert_same(load_pt(tmp_path / "packed.pt"), wanted)
    monkeypatch.setattr(pt, "_can_load_views", lambda: False)  # another torch
    (tmp_path / "m.pt").write_bytes(saved(wanted))
    assert_same(load_pt(tmp_path / "m.pt"), wanted)


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("new", [True, False])
def test_runs_no_code_unless_reported(tmp_path: Path, new: bool) -> None:
    torch.save({"x": Evil(tmp_path / "mark")}, tmp_path / "m.pt", _use_new_zipfile_serialization=new)
    with pytest.raises(CheckpointError, match="weights_only=False"):
        load_pt(tmp_path / "m.pt")
    assert not (tmp_path / "mark").exists()
    load_pt(tmp_path / "m.pt", weights_only=False)
    assert (tmp_path / "mark").exists()


def test_damaged_files(tmp_path: Path) -> None:
    data = saved({"x": torch.arange(1000.0), "y": torch.arange(5)})
    chance = random.Random(1)
    path = tmp_path / "m.pt"
    for size in [0, 1, 10, 500, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:size])
        with pytest.raises(BootseerError, match=r"m\.pt"):
            load_pt(path)
    for _ in range(150):  # without sums: an error, or tensors of the file's own size, never a crash
        changed = bytearray(data)
        changed[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(changed)
        try:
            found = load_pt(path)
        except BootseerError:
            continue
        for each in found.values():
            each.sum()
    path.write_bytes(b"not a checkpoint" * 100)
    with pytest.raises((IntegrityError, CheckpointError)):
        load_pt(path)


def test_has_to_be_one_file(tmp_path: Path) -> None:
    stripe(str(tmp_path), {"a.pt": saved(1), "b.pt": saved(2)})
    with pytest.raises(NotFound, match="name one"):
        load_pt(tmp_path)
    assert load_pt(tmp_path / "a.pt") == 1
    with pytest.raises(NotFound):
        load_pt(tmp_path / "c.pt")
