"""What is known of a folder that was unpacked from a tree is what a walk of it finds."""

from __future__ import annotations

import os
import random
import stat
from pathlib import Path

import pytest

from bootseer.env.capture.subtree import Subtree
from bootseer.env.capture.walk import walk
from bootseer.env.restore.in_place import paths_of
from bootseer.env.restore.markers import digest_of
from bootseer.env.restore.move import ComputedWalk, known_directory
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.index import Index
from tests.testing.trees import make_tree, write_tree


def index_of(folder: Path) -> Index:
    return build(DirectorySource(os.fspath(folder)), lambda _digest, _data: None, threads=1).tree


def known(index: Index, *gone: bytes) -> ComputedWalk | None:
    return known_directory(index, paths_of(Subtree(index, list(gone), set())))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "folder"
    (found / "lib" / "pkg.dist-info").mkdir(parents=True)
    (found / "lib" / "pkg.dist-info" / "RECORD").write_text("x")
    (found / "lib-2").mkdir(mode=0o700)  # sorts between lib and what is in it
    (found / "lib" / "empty").touch()
    (found / "link").symlink_to("lib/empty")
    os.link(found / "lib" / "empty", found / "lib-2" / "again")
    return found


def test_it_is_what_a_walk_finds(folder: Path) -> None:
    found = known(index_of(folder))
    assert found is not None and found.matches_sample(os.fspath(folder))
    assert found.sha256 == digest_of(walk(os.fspath(folder)))


@pytest.mark.parametrize("seed", range(8))
def test_so_it_is_for_any_tree(tmp_path: Path, seed: int) -> None:
    made = make_tree(random.Random(seed), 120, as_root=os.geteuid() == 0)
    kinds = (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)
    tree = {path: node for path, node in made.items() if stat.S_IFMT(node.mode) in kinds}
    write_tree(os.fspath(tmp_path), tree)
    found = known(index_of(tmp_path))
    assert found is not None and found.sha256 == digest_of(walk(os.fspath(tmp_path)))
    os.mkfifo(tmp_path / "one that is not looked at")
    assert known(index_of(tmp_path)) is None


def test_names_that_are_not_there_count(folder: Path) -> None:
    paths = [b"gone", b"lib/gone", b"lib/empty"]
    found = known(index_of(folder), *paths)
    there = walk(os.fspath(folder))
    assert found is not None and found.sha256 == digest_of(there, [*there, *paths])
    assert found.matches_sample(os.fspath(folder))
    (folder / "gone").touch()
    assert not found.matches_sample(os.fspath(folder))


@pytest.mark.parametrize("change", ["mode", "time", "size", "type", "removed", "folder"])
def test_a_look_sees_what_is_different(folder: Path, change: str) -> None:
    found = known(index_of(folder))
    assert found is not None
    path = folder / "lib" / "pkg.dist-info" / "RECORD"
    times = path.stat().st_mtime_ns
    if change == "mode":
        path.chmod(0o600)
    elif change == "time":
        os.utime(path, ns=(times, times - 1_000_000))
    elif change == "size":
        path.write_text("xy")
        os.utime(path, ns=(times, times))
    elif change == "type":
        path.unlink()
        path.symlink_to("elsewhere")
    elif change == "removed":
        path.unlink()
    else:
        (folder / "lib-2").chmod(0o755)
    assert not found.matches_sample(os.fspath(folder))
