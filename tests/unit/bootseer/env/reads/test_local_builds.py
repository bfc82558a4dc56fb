"""What installers have kept of the user's own archives and folders goes before set-up; nothing else does."""

from __future__ import annotations

import json
from pathlib import Path

from bootseer.env.reads.local_builds import drop_cached_builds


def made(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_wheels_of_directories_that_uv_has_kept(tmp_path: Path) -> None:
    cache = tmp_path / "uv"
    local = made(cache / "wheels-v8/index/0123/beta/1.0-py3-none-any.rev")
    fetched = made(cache / "wheels-v8/index/4567/beta/1.0-py3-none-any.http")
    kept = made(cache / "archive-v0/abc/beta/__init__.py")
    assert drop_cached_builds({"UV_CACHE_DIR": str(cache)}, []) == []
    assert not local.exists() and fetched.exists() and kept.exists()


def test_wheels_that_pip_has_built_of_archives_of_the_user(tmp_path: Path) -> None:
    def built(name: str, url: str) -> Path:
        directory = tmp_path / "pip/wheels/ab/cd/ef" / name
        made(directory / "origin.json", json.dumps({"archive_info": {}, "url": url}))
        return made(directory / "eps-1.0-py3-none-any.whl")

    local = built("1", "file:///jobs/wheels/eps-1.0.tar.gz")
    fetched = built("2", "https://example.org/eps-1.0.tar.gz")
    odd = made(tmp_path / "pip/wheels/ab/cd/ef/3/origin.json", "{")
    for environ in (
        {"PIP_CACHE_DIR": str(tmp_path / "pip")},
        {"XDG_CACHE_HOME": str(tmp_path)},
    ):
        built("1", "file:///jobs/wheels/eps-1.0.tar.gz")
        assert drop_cached_builds(environ, []) == []
        assert not local.exists() and fetched.exists() and odd.exists()
