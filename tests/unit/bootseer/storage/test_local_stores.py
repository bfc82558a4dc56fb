"""Which stores are folders of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.linux import page_cache
from bootseer.storage import local_stores


@pytest.mark.parametrize(
    ("url", "folder"),
    [
        ("/a/b", "/a/b"),
        ("file:///a/b%20c", "/a/b c"),
        ("http://host/a", ""),
        ("hdfs://host/a", ""),
        ("oci://host/a", ""),
        ("simplecache::file:///a", ""),
    ],
)
def test_directories(url: str, folder: str) -> None:
    assert local_stores.directory_of(url) == folder


@pytest.mark.parametrize("is_remote", [False, True])
def test_directories_of_a_server_are_not_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    monkeypatch.setattr(page_cache, "is_remote", lambda _: is_remote)
    assert local_stores.local_disk_directory_of(str(tmp_path)) == ("" if is_remote else str(tmp_path))
    assert local_stores.local_disk_directory_of("http://host/a") == ""
