"""Folders that have a model twice: one of the two is read, and the other is there for who opens it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bootseer import aio
from bootseer.checkpoint import load_file
from bootseer.checkpoint.format.doubles import find_duplicates


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors", "consolidated.safetensors", "config.json"], ["consolidated.safetensors"]),
        (
            ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "consolidated.00.pth"],
            ["consolidated.00.pth"],
        ),
        (["model.safetensors", "consolidated-00001-of-00002.pt"], ["consolidated-00001-of-00002.pt"]),
        (["model.safetensors", "original/c.00.pth", "original/a.json"], ["original/c.00.pth"]),
        (["model.safetensors", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (["model.safetensors", "pytorch_model-00001-of-00002.bin"], ["pytorch_model-00001-of-00002.bin"]),
        (["a/model.safetensors", "a/pytorch_model.bin", "b/pytorch_model.bin"], ["a/pytorch_model.bin"]),
        (["consolidated.safetensors", "params.json"], []),
        (["pytorch_model.bin"], []),
        (["model.safetensors", "optimizer.pt", "adapter_model.safetensors"], []),
        (["unet/model.safetensors", "consolidated.safetensors"], []),
        (["model.safetensors", "my_consolidated.safetensors", "consolidated.txt"], []),
        ([], []),
    ],
)  # fmt: skip
def test_names(names: list[str], expected: list[str]) -> None:
    assert sorted(find_duplicates(names)) == expected


def test_loaders_take_one(tmp_path: Path) -> None:
    save_file({"model.embed": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"tok_embeddings": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert list(load_file(str(tmp_path))) == ["model.embed"]
    assert list(load_file(str(tmp_path / "consolidated.safetensors"))) == ["tok_embeddings"]
    aio.close()
