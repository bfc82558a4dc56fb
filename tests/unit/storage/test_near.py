"""Which stores are folders of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from bootseer.storage import near, page_cache


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
def test_folders(url: str, folder: str) -> None:
    assert near.folder_of(url) == folder


@pytest.mark.parametrize("is_remote", [False, True])
def test_folders_of_a_server_are_not_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_remote: bool
) -> None:
    monkeypatch.setattr(page_cache, "is_remote", lambda _: is_remote)
    assert near.near_folder_of(str(tmp_path)) == ("" if is_remote else str(tmp_path))
    assert near.near_folder_of("http://host/a") == ""
