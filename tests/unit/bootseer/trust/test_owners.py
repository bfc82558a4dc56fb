"""Which stores can be believed without a signature, because nobody but this user can have written to them."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.errors import BootseerError
from bootseer.storage import Store, open_store
from bootseer.storage.fsspec.store import FsspecStore
from bootseer.storage.local.store import LocalStore
from bootseer.trust import owners
from bootseer.trust.owners import why_not_lineage, why_not_trusted_owner
from tests.testing.faulty_store import FaultyStore

numbers = itertools.count()


@pytest.fixture(autouse=True)
def plain_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def ask(store: Store, path: str = "tree.json", data: bytes = b"abc") -> str:
    return asyncio.run(why_not_trusted_owner(store, path, data))


@pytest.mark.parametrize("name", ["plain", "a b%20ü", "\udcff\udcfe"])
@pytest.mark.parametrize("may_hang", [False, True])
def test_directories_of_this_user(tmp_path: Path, name: str, may_hang: bool) -> None:
    directory = tmp_path / name
    (directory / "sub").mkdir(parents=True)
    for path in ("tree.json", "sub/tree.json"):
        (directory / path).write_bytes(b"abc")
        assert ask(LocalStore(str(directory), may_hang=may_hang), path) == ""
    for data in (b"abd", b"ab", b"abcd", b""):
        assert ask(LocalStore(str(directory)), data=data), "somebody exchanged it after it was read"
    (directory / "sub").chmod(0o777)
    assert "can be written to by others" in ask(LocalStore(str(directory)), "sub/tree.json")
    assert ask(LocalStore(str(directory))) == ""
    assert ask(LocalStore(str(directory)), "missing").endswith("missing no longer exists")


def test_nothing_outside_the_store_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_bytes(b"abc")
    (tmp_path / "store").mkdir()
    with pytest.raises(BootseerError, match="is no path below it"):
        ask(LocalStore(str(tmp_path / "store")), "../tree.json")


def test_a_file_system_that_hangs_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    released = threading.Event()
    monkeypatch.setattr(owners, "LOCAL_S", 0.05)
    monkeypatch.setattr(owners, "read_owned", lambda *_, **__: released.wait(30))
    try:
        assert "could not be inspected within 0.05 s" in ask(LocalStore(str(tmp_path)))
    finally:
        released.set()


def test_memory_of_this_process() -> None:
    assert ask(open_store(f"memory://owned{next(numbers)}/root")) == ""


def test_of_other_stores_nobody_can_tell(tmp_path: Path) -> None:
    (tmp_path / "tree.json").write_bytes(b"abc")
    for store in (
        open_store("http://127.0.0.1:1/tree"),
        open_store("https://example.com/tree"),
        open_store("s3://bucket/tree", options={"config": {"region": "us-east-1", "skip_signature": True}}),
        FsspecStore(f"file://{tmp_path}"),
        FaultyStore(LocalStore(str(tmp_path))),  # what stands between may change the bytes
    ):
        assert "the writers of a store of this kind" in ask(store)


@pytest.mark.parametrize(
    ("chain", "depth", "text"),
    [
        ([("hdfs", 0o755), ("hdfs", 0o755), ("ada", 0o700), ("ada", 0o644)], 2, ""),
        ([("hdfs", 0o755), ("ada", 0o755), ("ada", 0o700), ("ada", 0o644)], 2, ""),
        ([("ada", 0o755), ("ada", 0o644)], 0, ""),
        ([("hdfs", 0o755), ("hdfs", 0o1777), ("ada", 0o755), ("ada", 0o644)], 2, ""),
        (
            [("hdfs", 0o755), ("hdfs", 0o777), ("ada", 0o755), ("ada", 0o644)],
            2,
            "/a can be written",
        ),
        ([("hdfs", 0o775), ("ada", 0o755), ("ada", 0o644)], 1, "/ can be written"),
        (
            [("hdfs", 0o755), ("eve", 0o755), ("ada", 0o755), ("ada", 0o644)],
            2,
            "/a belongs to user eve",
        ),
        ([("hdfs", 0o755), ("eve", 0o755), ("ada", 0o644)], 1, "/a belongs to user eve, not to ada"),
        ([("hdfs", 0o755), ("hdfs", 0o755), ("ada", 0o644)], 1, "/a belongs to user hdfs, not to ada"),
        ([("hdfs", 0o755), ("ada", 0o755), ("eve", 0o755), ("ada", 0o644)], 1, "/a/b belongs to user eve"),
        ([("hdfs", 0o755), ("ada", 0o755), ("eve", 0o644)], 1, "/a/b belongs to user eve, not to ada"),
        ([("hdfs", 0o755), ("ada", 0o755), ("hdfs", 0o644)], 1, "/a/b belongs to user hdfs, not to ada"),
        (
            [("hdfs", 0o755), ("ada", 0o775), ("ada", 0o644)],
            1,
            "/a can be written to by others .mode 0775",
        ),
        (
            [("hdfs", 0o755), ("ada", 0o1777), ("ada", 0o644)],
            1,
            "/a can be written to by others .mode 1777",
        ),
        ([("hdfs", 0o755), ("ada", 0o755), ("ada", 0o664)], 1, "/a/b can be written to by others"),
        ([("hdfs", 0o755), ("ada", 0o755), ("ada", 0o646)], 1, "/a/b can be written to by others"),
        ([("hdfs", 0o755), ("", 0o755), ("ada", 0o644)], 1, "HDFS does not report the owner of /"),
        ([("", 0o755), ("ada", 0o755), ("ada", 0o644)], 1, "HDFS does not report the owner of /"),
        ([("hdfs", 0o755), ("ada", 0o755), ("ada", -1)], 1, "HDFS does not report the owner of /"),
    ],
)
def test_owners_and_modes_of_hdfs(chain: list[tuple[str, int]], depth: int, text: str) -> None:
    paths = ["/", "/a", "/a/b", "/a/b/c"]
    found = why_not_lineage([(path, *each) for path, each in zip(paths, chain, strict=False)], "ada", depth)
    assert re.match(text, found) if text else found == ""
