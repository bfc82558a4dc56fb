"""What was written beside the targets: within bounds, and never a cache."""

from __future__ import annotations

import os
from pathlib import Path

from bootseer.env.capture.outside import MAX_NAMES, SampledPlace, cache_directories, compare, places, sample


def test_new_changed_and_gone(tmp_path: Path) -> None:
    for name in ("same", "changed", "gone"):
        (tmp_path / name).write_text(name)
    (tmp_path / "folder").mkdir()
    wanted = [SampledPlace(os.fspath(tmp_path), True)]
    before = sample(wanted, [])
    (tmp_path / "changed").write_text("another")
    (tmp_path / "gone").unlink()
    (tmp_path / "folder" / "deep").write_text("x")
    (tmp_path / "folder" / "__pycache__").mkdir()
    (tmp_path / "new" / "below").mkdir(parents=True)
    (tmp_path / "ours.log").write_text("x")
    found = compare(before, sample(wanted, []), [f"{tmp_path}/ours.log"])
    assert found == [f"{tmp_path}/{name}" for name in ("changed", "folder/deep", "gone", "new")]


def test_flat_place(tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "my.egg-info").mkdir()
    seen = sample([SampledPlace(os.fspath(tmp_path), False)], [])
    assert seen.keys() == {f"{tmp_path}", f"{tmp_path}/my.egg-info"}


def test_bounds(tmp_path: Path) -> None:
    """Broad before deep; what was looked at only once is not reported."""
    for number in range(20):
        (tmp_path / f"folder{number:02}" / "below").mkdir(parents=True)
    wanted = [SampledPlace(os.fspath(tmp_path), True)]
    few = sample(wanted, [], max_entries=22)
    assert f"{tmp_path}/folder00" in few
    assert len(few) == 3
    assert sample(wanted, [], timeout_s=0.0) == {}
    assert compare(few, sample(wanted, []), []) == []
    assert sample([SampledPlace(f"{tmp_path}/nowhere", True)], []) == {f"{tmp_path}/nowhere": {}}
    many = {"/a": {str(number): (0, 0, 0) for number in range(2 * MAX_NAMES)}}
    assert len(compare({"/a": {}}, many, [])) == MAX_NAMES


def test_what_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "cache" / "below").mkdir(parents=True)
    assert sample([SampledPlace(os.fspath(tmp_path), True)], [f"{tmp_path}/cache"]).keys() == {f"{tmp_path}"}


def test_caches() -> None:
    environ = {"HOME": "/home/me", "PIP_CACHE_DIR": "/pip/", "UV_CACHE_DIR": "relative", "TMPDIR": "/scratch"}
    assert cache_directories(environ) == ["/home/me/.cache", "/pip", "/scratch", "/tmp", "/var/tmp"]
    assert cache_directories({}) == ["/tmp", "/var/tmp"]
    own = {"BOOTSEER_CACHE": "/own/cache", "BOOTSEER_RUNTIME": "/own/run", "BOOTSEER_KEYS": "/own/keys"}
    assert {"/own/cache", "/own/run", "/own/keys"} <= set(cache_directories(own))


def test_places(tmp_path: Path) -> None:
    site = tmp_path / "base" / "lib" / "python3.11" / "site-packages"
    site.mkdir(parents=True)
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").write_text(f"version = 3.11\nhome = {tmp_path}/base/bin\n")
    found = places({"HOME": "/home/me"}, [f"{tmp_path}/venv", "/nowhere"], "/job")
    assert found == [
        SampledPlace("/job", False),
        SampledPlace(os.fspath(site), True),
        SampledPlace("/home/me/.local", True),
        SampledPlace("/usr/local", True),
    ]
