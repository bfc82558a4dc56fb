"""What names say about saves."""

from __future__ import annotations

import pytest

from bootseer.mounts.fuse.rules import (
    find_missing,
    find_named,
    find_parts,
    find_step,
    is_part,
    is_side_file,
    is_temporary,
)


@pytest.mark.parametrize(
    "name",
    [
        "model.pt.tmp",
        "tmp-checkpoint-5",
        "step-5.incomplete",
        ".model.pt.a8s7",
        "model.pt~",
        "a.part",
        "x.tmp8s7d",
    ],
)
def test_names_of_what_is_not_finished(name: str) -> None:
    assert is_temporary(name)


@pytest.mark.parametrize(
    "name",
    ["model.pt", "checkpoint-500", "template.pt", "my_template", "attempt-1", "step-5", "parts"],
)
def test_names_of_what_is(name: str) -> None:
    assert not is_temporary(name)


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-20", 20), ("epoch=3-step=500.ckpt", 500), ("iter_0000010", 10), ("model.pt", None), ("model2.pt", 2)],
)
def test_step(name: str, step: int | None) -> None:
    assert find_step(name) == step


def test_pointers_name_directories() -> None:
    directories = ["global_step10", "iter_0000020", "global_step20"]
    assert find_named("global_step20\n", directories) == "global_step20"
    assert find_named("20", directories) == "iter_0000020"
    assert find_named("release", directories) == ""


def test_parts() -> None:
    assert is_part("model-00001-of-00002.safetensors")
    assert is_part("__0_0.distcp")
    assert not is_part("model-00001-of-00001.safetensors")
    assert not is_part("model.safetensors")
    assert find_parts(b"..\x8c\x0c__0_0.distcp\x94..__12_3.distcp") == {"__0_0.distcp", "__12_3.distcp"}


def test_small_files_go_along() -> None:
    assert is_side_file("args.json", 500)
    assert is_side_file("latest", 13)
    assert not is_side_file("tiny.pt", 500)
    assert not is_side_file("table", 50 << 20)


@pytest.mark.parametrize(
    ("paths", "says"),
    [
        ({"model.pt": 1, "config.json": 2}, ""),
        ({"__0_0.distcp": 1}, "__0_0.distcp has no .metadata"),
        ({"__0_0.distcp": 1, ".metadata": 2}, ""),
        ({"__0_0.distcp": 3, ".metadata": 2}, "__0_0.distcp has no .metadata"),
        ({"model/__0_0.distcp": 1, "optimizer/__0_0.distcp": 2, "model/.metadata": 3}, "optimizer/__0_0.distcp"),
        ({"model-00001-of-00002.safetensors": 1}, "1 of 2 parts"),
        ({"model-00001-of-00002.safetensors": 1, "model-00002-of-00002.safetensors": 2}, ""),
        ({"model-1-of-2.pt": 1, "optim-2-of-2.pt": 2}, "1 of 2 parts"),
        ({"model.pt": 1, "optimizer.pt.tmp": 2}, "optimizer.pt.tmp has the name of an unfinished file"),
        ({"model.pt": 1, ".gitattributes": 2}, ""),
    ],
)
def test_what_is_missing(paths: dict[str, int], says: str) -> None:
    found = find_missing(paths)
    assert says in found
    assert bool(found) == bool(says)
