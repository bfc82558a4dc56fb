"""`bootseer.checkpoint.open`: files and tensors by name, of safetensors files and of DCP folders."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

import bootseer.checkpoint
from bootseer.errors import CheckpointError, NotFound
from tests.unit.bootseer.checkpoint.sources import noise, put, stripe
from tests.unit.bootseer.checkpoint.test_pt import saved

TENSORS = {"a": torch.arange(12.0).reshape(3, 4), "b": torch.arange(5), "c.weight": torch.ones(2)}
FILES = {"model.safetensors": save(TENSORS), "state.pt": saved({"step": 5}), "raw/x": noise(9000)}


@pytest.mark.parametrize("kind", ["put", "stripe"])
@pytest.mark.parametrize("place", ["memory://api", "disk"])
def test_files_and_tensors(tmp_path: Path, kind: str, place: str) -> None:
    url = str(tmp_path) if place == "disk" else f"{place}-{kind}"
    (stripe if kind == "stripe" else put)(url, FILES)
    with bootseer.checkpoint.open(url) as checkpoint:
        assert sorted(checkpoint.files) == sorted(FILES)
        assert sorted(checkpoint.keys()) == list(TENSORS)
        assert bool(checkpoint.version) == (kind == "stripe")
        assert len(checkpoint.digest) == 64
        assert torch.equal(checkpoint.tensor("a"), TENSORS["a"])
        found = checkpoint.tensors(["b", "a"])
        assert list(found) == ["b", "a"]
        assert sorted(checkpoint.tensors()) == list(TENSORS)
        buffer = bytearray(100)
        checkpoint.read_into("raw/x", 50, buffer)
        assert buffer == FILES["raw/x"][50:150]
        assert checkpoint.load("raw/x") == FILES["raw/x"]
        assert checkpoint.load("state.pt") == {"step": 5}
        assert torch.equal(checkpoint.load("model.safetensors")["b"], TENSORS["b"])
        assert checkpoint.stats()["requests"] > 0
        for call in (checkpoint.tensor, checkpoint.load, checkpoint.wait):
            with pytest.raises(NotFound):
                call("nothing")
    assert torch.equal(found["a"], TENSORS["a"])  # lives on


def test_waiting_makes_the_next_call_read_nothing() -> None:
    stripe("memory://wait", FILES)
    with bootseer.checkpoint.open("memory://wait") as checkpoint:
        checkpoint.wait("a")
        checkpoint.wait("raw/x")
        before = checkpoint.stats()["requests"]
        assert torch.equal(checkpoint.tensor("a"), TENSORS["a"])
        assert checkpoint.load("raw/x") == FILES["raw/x"]
        assert checkpoint.stats()["requests"] == before


def test_filters() -> None:
    stripe("memory://filters", FILES)
    with bootseer.checkpoint.open("memory://filters", keys=lambda name: len(name) == 1) as checkpoint:
        assert sorted(checkpoint.keys()) == ["a", "b"]
        assert sorted(checkpoint.load("model.safetensors")) == ["a", "b"]
        with pytest.raises(NotFound, match="leaves it out"):
            checkpoint.tensor("c.weight")
    with (
        pytest.raises(NotFound, match="zzz"),
        bootseer.checkpoint.open("memory://filters", keys=["zzz"]) as checkpoint,
    ):
        checkpoint.keys()


def test_part_of_a_checkpoint() -> None:
    stripe("memory://part", FILES)
    with bootseer.checkpoint.open("memory://part/raw") as checkpoint:
        assert list(checkpoint.files) == ["x"]
        assert checkpoint.load("x") == FILES["raw/x"]
    with bootseer.checkpoint.open("memory://part/state.pt") as checkpoint:
        assert list(checkpoint.files) == ["state.pt"]
        assert checkpoint.load("state.pt") == {"step": 5}
        with pytest.raises(CheckpointError, match="no tensors by name"):
            checkpoint.keys()


@pytest.mark.parametrize("place", ["disk", "memory"])
def test_dcp_directories(tmp_path: Path, place: str) -> None:
    state: dict[str, Any] = {**TENSORS, "h": torch.randn(4, 4).to(torch.float16), "step": 7}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    url = str(tmp_path / "dcp")
    if place == "memory":
        url = f"memory://{tmp_path.name}"
        stripe(url, {name: (tmp_path / "dcp" / name).read_bytes() for name in os.listdir(tmp_path / "dcp")})
    with bootseer.checkpoint.open(url) as checkpoint:
        assert sorted(checkpoint.keys()) == sorted([*TENSORS, "h"])
        for name, each in checkpoint.tensors().items():
            assert torch.equal(each, state[name])
        assert torch.equal(checkpoint.tensor("h"), state["h"])
    with bootseer.checkpoint.open(url, keys=["a"]) as checkpoint:
        assert list(checkpoint.tensors()) == ["a"]


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, bootseer.checkpoint as c; c.open\n"
        "print([name for name in ('torch', 'asyncio', 'msgspec', 'fsspec', 'numpy') if name in sys.modules])"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "torch" not in made.stdout
    assert "fsspec" not in made.stdout
    with pytest.raises(AttributeError):
        bootseer.checkpoint.nothing  # noqa: B018
