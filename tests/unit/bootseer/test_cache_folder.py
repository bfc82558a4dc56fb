"""Where the cache is, whose it is, and how large it may be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bootseer.cache_folder import Limit, locate, make_private_dir, parse_limit, prepare
from bootseer.errors import ConfigError, StorageError
from tests.support import lacking

IS_ROOT = os.geteuid() == 0


def test_variables_say_where_it_is() -> None:
    assert locate({"BOOTSEER_CACHE": "/fast/disk/", "HOME": "/root"}, 0) == "/fast/disk"
    assert locate({"BOOTSEER_CACHE": "/fast/disk/", "HOME": "/home/u"}, 1000) == "/fast/disk"
    assert locate({"HOME": "/root"}, 0) == "/var/cache/bootseer"
    assert locate({"HOME": "/home/u"}, 1000) == "/home/u/.cache/bootseer"
    assert locate({"HOME": "/home/u", "XDG_CACHE_HOME": "/x"}, 1000) == "/x/bootseer"
    assert locate({"HOME": "/home/u", "XDG_CACHE_HOME": "relative"}, 1000) == "/home/u/.cache/bootseer"
    with pytest.raises(ConfigError, match="absolute"):
        locate({"BOOTSEER_CACHE": "cache"}, 0)
    with pytest.raises(ConfigError, match="BOOTSEER_CACHE"):
        locate({}, 1000)


def test_it_is_made_for_this_user_alone(tmp_path: Path) -> None:
    made = prepare(os.fspath(tmp_path / "a" / "b"))
    assert os.stat(made).st_mode & 0o777 == 0o700
    assert prepare(made) == made


@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777])
def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "cache").mkdir()
    os.chmod(tmp_path / "cache", mode)
    with pytest.raises(ConfigError, match=r"others may write.*chmod 700"):
        prepare(os.fspath(tmp_path / "cache"))


@pytest.mark.system
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    if not IS_ROOT:
        pytest.skip("giving a folder to another user needs root")
    (tmp_path / "cache").mkdir(mode=0o700)
    os.chown(tmp_path / "cache", 12345, -1)
    with pytest.raises(ConfigError, match="belongs to user 12345"):
        prepare(os.fspath(tmp_path / "cache"))


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o770])
def test_a_directory_above_that_others_may_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """They could exchange the cache for one of theirs, whoever it belongs to."""
    above = tmp_path / "shared"
    cache = prepare(os.fspath(above / "users" / "cache"))
    above.chmod(mode)
    with pytest.raises(ConfigError) as caught:
        prepare(cache)
    text = str(caught.value)
    assert f"chmod go-w {above}" in text and "BOOTSEER_CACHE" in text and "\n" not in text
    above.chmod(mode & 0o755)
    assert prepare(cache) == cache


def test_directories_as_users_have_them_are_right(tmp_path: Path) -> None:
    shared = tmp_path / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    cache = prepare(os.fspath(shared / "cache"))
    os.chmod(cache, 0o750)
    assert prepare(cache) == cache
    (tmp_path / "link").symlink_to(shared)
    assert prepare(os.fspath(tmp_path / "link" / "cache")) == os.fspath(tmp_path / "link" / "cache")


@pytest.mark.system
def test_a_directory_above_of_another_user_is_refused(tmp_path: Path) -> None:
    if not IS_ROOT:
        pytest.skip("giving a folder to another user needs root")
    cache = prepare(os.fspath(tmp_path / "theirs" / "cache"))
    os.chown(tmp_path / "theirs", 12345, -1)
    with pytest.raises(ConfigError, match=r"theirs belongs to user 12345.*BOOTSEER_CACHE"):
        prepare(cache)


@pytest.mark.system
def test_where_root_is_nobody_its_directories_are_roots(tmp_path: Path) -> None:
    """As in containers without root: only this user is mapped, and / belongs to nobody."""
    if not IS_ROOT:
        pytest.skip("a folder of another user is made by root")
    tmp_path.chmod(0o755)
    os.chown(tmp_path, 12345, -1)  # not mapped below, as root is not in a container
    code = f"from bootseer.cache_folder import prepare; print(prepare({os.fspath(tmp_path / 'cache')!r}))"
    (tmp_path / "cache").mkdir(mode=0o700)
    run = subprocess.run(
        ["unshare", "--user", "--map-root-user", sys.executable, "-c", code], capture_output=True, text=True
    )
    if run.returncode and "unshare" in run.stderr:
        lacking("there are no user namespaces here")
    assert run.stdout == f"{tmp_path}/cache\n", run.stderr


def test_what_is_made_is_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        made = prepare(os.fspath(tmp_path / "a" / "b"))
        make_private_dir(os.path.join(made, "trees", "0"))
    finally:
        os.umask(before)
    for name in ("a", "a/b", "a/b/trees", "a/b/trees/0"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", ["trees", "unpacked"])
def test_directories_in_it_that_others_may_write_to_are_refused(tmp_path: Path, name: str) -> None:
    cache = prepare(os.fspath(tmp_path / "cache"))
    os.mkdir(os.path.join(cache, name))
    os.chmod(os.path.join(cache, name), 0o775)
    with pytest.raises(ConfigError, match=f"cache/{name}: others may write.*chmod 700"):
        prepare(cache)


def test_what_is_no_directory_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError, match="file"):
        prepare(os.fspath(tmp_path / "file"))
    with pytest.raises(StorageError, match="file"):
        prepare(os.fspath(tmp_path / "file" / "cache"))


def test_nodes_that_share_a_directory_have_one_each(tmp_path: Path) -> None:
    made = prepare(os.fspath(tmp_path / "cache"), node="node/../17")
    assert made == os.fspath(tmp_path / "cache" / "node-node_.._17")
    assert os.stat(made).st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("50%", Limit(share=0.5)),
        ("100 %", Limit(share=1.0)),
        ("200GiB", Limit(200 << 30, 1.0)),
        ("1.5T", Limit(3 << 39, 1.0)),
        ("10MB", Limit(10 << 20, 1.0)),
        ("4096", Limit(4096, 1.0)),
        ("0", Limit(0, 1.0)),
        ("7b", Limit(7, 1.0)),
    ],
)
def test_limits_are_sizes_or_shares(text: str, limit: Limit) -> None:
    assert parse_limit(text) == limit


@pytest.mark.parametrize("text", ["", "much", "-1", "101%", "1.2.3", "10 XB", "1e9", "nan"])
def test_other_limits_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="cache"):
        parse_limit(text)
