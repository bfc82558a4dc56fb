"""The guard of the user's cache sees what tests write there, and nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support import clean_environ
from tests.user_cache import VARIABLE, UserCache


@pytest.fixture
def cache(tmp_path: Path) -> UserCache:
    for kind in ("imports", "loads", "minihdfs"):
        (tmp_path / "bootseer" / kind).mkdir(parents=True)
    (tmp_path / "bootseer/imports/old.imports").write_text("target /tmp/bt-1/old.py")
    cache = UserCache({"XDG_CACHE_HOME": os.fspath(tmp_path)})
    cache.close()
    return cache


def test_what_a_test_wrote_is_found(cache: UserCache, tmp_path: Path) -> None:
    directory = tmp_path / "bootseer"
    (directory / "imports/new.imports").write_text("target /tmp/bt-1/new.py")
    (directory / "imports/theirs.imports").write_text("target /home/them/train.py")
    (directory / "loads/0.json").write_text("{}")
    (directory / "minihdfs/jar").write_text("kept from run to run")
    new = [f"{directory}/imports/new.imports"]
    assert cache.written(["/tmp/bt-1"], is_alone=False) == new
    assert cache.written(["/tmp/bt-1"], is_alone=True) == [
        *new, f"{directory}/imports/theirs.imports", f"{directory}/loads/0.json",
    ]  # fmt: skip


def test_a_record_that_was_replaced_is_found(cache: UserCache, tmp_path: Path) -> None:
    path = tmp_path / "bootseer/imports/old.imports"
    assert cache.written(["/tmp/bt-1"], is_alone=True) == []
    (tmp_path / "other").write_text(path.read_text())
    os.replace(tmp_path / "other", path)
    assert cache.written(["/tmp/bt-1"], is_alone=False) == [os.fspath(path)]


def test_programs_of_tests_remember_jobs_elsewhere() -> None:
    assert clean_environ()[VARIABLE] == os.environ[VARIABLE] != ""
    assert os.path.basename(os.environ[VARIABLE]).startswith("bt-records-")
