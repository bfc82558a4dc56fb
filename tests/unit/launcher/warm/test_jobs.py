"""Job files: which are believed, and what they say."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bootseer.errors import ConfigError
from bootseer.job_file import MAX_BYTES
from launcher.warm.jobs import JobFile, RefusedFile, environ_of, parse_job, read_directory, why_refused

REGULAR = stat.S_IFREG | 0o644


@pytest.mark.parametrize(
    ("mode", "owner", "links", "uid", "says"),
    [
        (REGULAR, 1000, 1, 0, ""),
        (REGULAR, 1000, 1, 1000, ""),
        (REGULAR, 0, 1, 1000, ""),
        (REGULAR, 1000, 1, 1001, "belongs to user 1000"),
        (REGULAR | stat.S_IWGRP, 1000, 1, 0, "chmod go-w"),
        (REGULAR | stat.S_IWOTH, 0, 1, 0, "chmod go-w"),
        (REGULAR, 1000, 2, 0, "more than one name"),
        (stat.S_IFIFO | 0o644, 0, 1, 0, "is no file"),
        (stat.S_IFDIR | 0o755, 0, 1, 0, "is no file"),
    ],
)
def test_who_is_trusted(mode: int, owner: int, links: int, uid: int, says: str) -> None:
    found = why_refused(mode, owner, links, uid)
    assert says in found
    assert bool(found) == bool(says)


@given(st.integers(0, 0o7777), st.integers(0, 3), st.integers(1, 3), st.integers(0, 3))
def test_nothing_that_others_could_have_written_is_trusted(mode: int, owner: int, links: int, uid: int) -> None:
    if not why_refused(stat.S_IFREG | mode, owner, links, uid):
        assert not mode & (stat.S_IWGRP | stat.S_IWOTH)
        assert links == 1
        assert uid == 0 or owner in (0, uid)


def test_a_directory_of_job_files(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[env]\nstore = 'x'\n")
    (tmp_path / "b.toml").write_text("[env]\n")
    (tmp_path / "b.toml").chmod(0o666)
    (tmp_path / "c.toml").symlink_to(tmp_path / "a.toml")
    os.mkfifo(tmp_path / "d.toml")
    (tmp_path / "e.toml").write_bytes(b"#" * (MAX_BYTES + 1))
    (tmp_path / ".hidden.toml").write_text("")
    (tmp_path / "notes.txt").write_text("")
    found = {each.name: each for each in read_directory(os.fspath(tmp_path), os.geteuid())}
    assert list(found) == ["a.toml", "b.toml", "c.toml", "d.toml", "e.toml"]
    good = found.pop("a.toml")
    assert isinstance(good, JobFile)
    assert (good.owner, good.text) == (os.geteuid(), b"[env]\nstore = 'x'\n")
    assert all(isinstance(each, RefusedFile) for each in found.values()), found


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read_directory(os.fspath(tmp_path / "jobs"), 0)


def test_what_a_job_file_says() -> None:
    text = b"""
[job]
folder = "/home/ann"
command = ["--nproc-per-node", "8", "train.py"]
python = "/home/ann/venv/bin/python"
[image]
url = "/trees/a"
"""
    job = parse_job(text, "a.toml")
    assert job[:3] == ("/home/ann", ("--nproc-per-node", "8", "train.py"), "/home/ann/venv/bin/python")
    assert job.settings["--image"] == "/trees/a"
    assert parse_job(b"", "b.toml")[:3] == ("", (), "")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[job]\nfolder = 'here'\n", "a.toml: \\[job\\] folder 'here': must be an absolute path"),
        (b"[job]\ncommand = 'train.py'\n", "a.toml:2: \\[job\\] command: has to be a list of texts"),
        (b"[job]\nuser = 'root'\n", "a.toml:2: unknown key 'user' in \\[job\\]"),
        (b"[jobs]\n", "a.toml:1: unknown table \\[jobs\\]"),
    ],
)
def test_mistakes_name_file_and_line(text: bytes, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_job(text, "a.toml")


def test_another_user_gets_nothing_of_the_daemon() -> None:
    mine = {"LD_PRELOAD": "/x", "BOOTSEER_CACHE": "/root/cache", "PYTHONPATH": "/x", "LANG": "C"}
    entry = next(each for each in pwd.getpwall() if each.pw_uid != os.geteuid())
    found = environ_of(entry.pw_uid, os.geteuid(), mine, "/venv/bin/python")
    assert found["HOME"] == entry.pw_dir and found["PYTHON_EXEC"] == "/venv/bin/python"
    assert not {"LD_PRELOAD", "BOOTSEER_CACHE", "PYTHONPATH"} & set(found)
    assert environ_of(os.geteuid(), os.geteuid(), mine, "") == mine


def test_a_user_that_is_not_there() -> None:
    taken = {each.pw_uid for each in pwd.getpwall()}
    nobody = next(uid for uid in range(40_000, 41_000) if uid not in taken)
    with pytest.raises(ConfigError, match=f"no user {nobody}"):
        environ_of(nobody, 0, {}, "")
