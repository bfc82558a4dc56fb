"""What a node's ranks need of a version."""

from __future__ import annotations

from bootseer.checkpoint.format.layout import Layout
from bootseer.checkpoint.io.direct import StoredFile
from bootseer.checkpoint.service.needs import Needs
from bootseer.checkpoint.versions.pinned import Pinned

MODEL, SAME = "model.safetensors", "consolidated.safetensors"


def version(*names: str) -> Pinned:
    files = tuple(StoredFile(name, Layout(100, 16, 1), (name,)) for name in names)
    return Pinned("plain", "", "", "0" * 64, files)


def test_all_of_a_plain_checkpoint_is_needed() -> None:
    needs = Needs(version(MODEL, SAME))
    assert needs.is_whole and needs.spare == {SAME} and needs.bytes == 100


def test_parts_are_needed_where_other_nodes_need_other_parts() -> None:
    assert not Needs(version("a.bin", "b.bin"), nodes=2).is_whole
    assert Needs(version("a.bin"), nodes=2).is_whole
    assert not Needs(version("__0_0.distcp", "sub/.metadata")).is_whole


def test_all_of_it_can_be_required() -> None:
    needs = Needs(version(MODEL, SAME, ".metadata"), must_be_whole=True, nodes=2)
    assert needs.is_whole and needs.spare == frozenset() and needs.bytes == 300
