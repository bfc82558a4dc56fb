"""The part of a tree that belongs to a target is the same, whether it is found entry by entry or as a whole."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from bootseer.env.capture import subtree as subtrees
from bootseer.env.capture.subtree import subtree
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.index import Index, check
from tests.testing.trees import Node, make_tree, write_tree


def index_of(directory: Path) -> Index:
    return build(DirectorySource(os.fspath(directory)), lambda _digest, _data: None, threads=1).tree


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("others", [(), (b"1",), (b"!",)], ids=["alone", "before another", "after another"])
def test_as_entry_by_entry(
    tmp_path: Path, seed: int, others: tuple[bytes, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_tree(random.Random(seed), 60, as_root=os.geteuid() == 0)
    if seed % 2:  # without whiteouts, which only overlayfs has
        gone = {path for path, node in made.items() if stat.S_ISCHR(node.mode) and node.rdev == (0, 0)}
        made = {path: node for path, node in made.items() if path not in gone and node.link not in gone}
    tree = {b"": Node(stat.S_IFDIR | 0o755)}
    for name in (b"0", *others):
        tree |= {
            (name + b"/" + path if path else name): node._replace(link=node.link and name + b"/" + node.link)
            for path, node in made.items()
        }
    write_tree(os.fspath(tmp_path), tree)
    index = index_of(tmp_path)
    for name in (b"0", *others):
        found = subtree(index, name)
        with monkeypatch.context() as patched:
            patched.setattr(subtrees, "_is_all", lambda _index, _directory: False)
            assert subtree(index, name) == found
        check(found.tree, "a subtree")
        assert len(found.tree) + len(found.deleted) == len(made)
