"""What a start has read becomes blocks of the tree that was made of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bootseer.env.service.access_trace import AccessedFile, blocks_of, without_links
from bootseer.tree.builder.building import build
from bootseer.tree.builder.from_directory import DirectorySource
from bootseer.tree.index import BLOCK_BYTES, BLOCK_UNITS, HOLE, Index

SIZES = {"small.py": 100, "pkg/__init__.py": 5000, "pkg/large.so": 5 * BLOCK_BYTES + 77, "empty": 0}
SIZES |= {"pkg/slow.py": 400_000, "pkg/__pycache__/slow.cpython-311.pyc": 3 * BLOCK_BYTES}
SIZES |= {"pkg/__pycache__/slow.cpython-311.opt-1.pyc": BLOCK_BYTES}


@pytest.fixture
def index(tmp_path: Path) -> Index:
    """Of an environment with one target."""
    for name, size in SIZES.items():
        path = tmp_path / "tree" / "0" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    os.link(tmp_path / "tree/0/small.py", tmp_path / "tree/0/zlink.py")
    return build(DirectorySource(os.fspath(tmp_path / "tree")), lambda _digest, _data: None, threads=1).tree


def data_of(index: Index, path: str) -> list[int]:
    """Blocks of a file, found by its name alone."""
    (entry,) = [each for each in range(len(index)) if index.path(each) == path.encode()]
    return [address // BLOCK_UNITS for _, address, _ in index.pieces(entry) if address != HOLE]


def test_files_in_the_order_of_their_first_use(index: Index) -> None:
    large = data_of(index, "0/pkg/large.so")
    assert len(large) == 6
    found = list(
        blocks_of(index, ["/venv"], [AccessedFile("/venv/pkg/large.so", ()), AccessedFile("/venv/small.py", ())])
    )
    assert found[:6] == large and set(found) == {*large, *data_of(index, "0/small.py")}
    assert len(set(found)) == len(found)
    again = list(
        blocks_of(index, ["/venv"], [AccessedFile("/venv/small.py", ()), AccessedFile("/venv/pkg/large.so", ())])
    )
    assert again[0] == data_of(index, "0/small.py")[0] and set(again) == set(found)


@pytest.mark.parametrize(
    ("ranges", "pieces"),
    [
        ([(0, 1)], [0]),
        ([(BLOCK_BYTES - 1, 1)], [0]),
        ([(BLOCK_BYTES - 1, 2)], [0, 1]),
        ([(BLOCK_BYTES, 4096), (4 * BLOCK_BYTES, 9)], [1, 4]),
        ([(5 * BLOCK_BYTES, 1 << 40)], [5]),
        ([(9 * BLOCK_BYTES, 4096)], []),  # it was longer then
        ([(4 * BLOCK_BYTES, 9), (0, 1), (4 * BLOCK_BYTES + 20, BLOCK_BYTES)], [4, 0, 5]),  # as it was needed
    ],
)
def test_of_a_library_only_what_was_touched(
    index: Index, ranges: list[tuple[int, int]], pieces: list[int]
) -> None:
    blocks = data_of(index, "0/pkg/large.so")
    touched = [AccessedFile("/venv/pkg/large.so", ranges)]
    assert list(blocks_of(index, ["/venv/"], touched)) == [blocks[piece] for piece in pieces]


def test_what_is_in_no_target_or_not_in_the_tree(index: Index) -> None:
    paths = ["/venv2/small.py", "/venv/none.py", "/venv", "/usr/lib/python3/os.py", "/venv/empty", "/venv/pkg"]
    assert list(blocks_of(index, ["/venv"], [AccessedFile(path, ()) for path in paths])) == []


def test_a_file_by_another_of_its_names(index: Index) -> None:
    found = [
        list(blocks_of(index, ["/venv"], [AccessedFile(f"/venv/{name}.py", ())])) for name in ("small", "zlink")
    ]
    assert found[0] == found[1] == data_of(index, "0/small.py")


def test_paths_with_links(index: Index, tmp_path: Path) -> None:
    """A target has none; modules are known by the path at which they were found."""
    (tmp_path / "data/venv/lib").mkdir(parents=True)
    (tmp_path / "home").symlink_to("data")
    (tmp_path / "data/venv/lib64").symlink_to("lib")
    touched = [
        AccessedFile(f"{tmp_path}/home/venv/{name}", ()) for name in ("small.py", "lib64/x.py", "lib64/y.py")
    ]
    assert [each.path for each in without_links(touched)] == [
        f"{tmp_path}/data/venv/{name}" for name in ("small.py", "lib/x.py", "lib/y.py")
    ]
    blocks = list(blocks_of(index, [f"{tmp_path}/data/venv"], without_links(touched)))
    assert blocks == data_of(index, "0/small.py")


def test_bytecode_that_was_compiled_for_others(index: Index) -> None:
    """The builder had none, and has read the source."""
    found = list(blocks_of(index, ["/venv"], [AccessedFile("/venv/pkg/slow.py", [(0, 4096)])]))
    assert found == data_of(index, "0/pkg/__pycache__/slow.cpython-311.pyc") and len(found) == 3


def test_a_source_that_is_read_beside_its_bytecode(index: Index) -> None:
    """As by `inspect`, while a module is imported."""
    touched = [AccessedFile(f"/venv/pkg/{name}", ()) for name in ("__pycache__/slow.cpython-311.pyc", "slow.py")]
    found = list(blocks_of(index, ["/venv"], touched))
    assert found == [*data_of(index, "0/pkg/__pycache__/slow.cpython-311.pyc"), *data_of(index, "0/pkg/slow.py")]
