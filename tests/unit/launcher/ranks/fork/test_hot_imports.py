"""Records of imports: kept and read again, and what is not believed; devices below a root of our own."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.ranks.fork import hot_imports
from launcher.ranks.fork.hot_imports import (
    ImportRecord,
    JobKey,
    cache_dir,
    make_key,
    read_listing,
    read_record,
    write_record,
)
from launcher.ranks.fork.policy import MAX_MODULES

KEY = JobKey("/usr/bin/python3", "script", "/home/me/train.py", "", "17 4")
RECORD = ImportRecord(("torch", "torch.nn", "json"), {"bad.module": "it printed"}, "/home/me/.cache/first step/1f")
DAY_S = 86_400


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return os.fspath(tmp_path / "cache" / "imports")


def only_file(folder: str) -> str:
    (name,) = os.listdir(folder)
    return os.path.join(folder, name)


def kept(folder: str) -> str:
    """Writes the record; returns its file."""
    assert write_record(folder, KEY, RECORD) == ""
    return only_file(folder)


def rewrite(path: str, change: Callable[[bytes], bytes]) -> None:
    data = Path(path).read_bytes()
    Path(path).write_bytes(change(data))


# ---- kept and read again -------------------------------------------------------------------------------------


def test_record_is_kept(folder: str) -> None:
    assert read_record(folder, KEY) is None
    path = kept(folder)
    assert read_record(folder, KEY) == RECORD
    assert os.path.basename(path).startswith("train.py-")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    assert stat.S_IMODE(os.stat(os.path.dirname(folder)).st_mode) == 0o700


def test_later_record_takes_the_place(folder: str) -> None:
    kept(folder)
    assert write_record(folder, KEY, ImportRecord(("yaml",), {})) == ""
    assert read_record(folder, KEY) == ImportRecord(("yaml",), {})
    edited = KEY._replace(stamp="18 4")
    assert write_record(folder, edited, RECORD) == ""
    assert read_record(folder, KEY) is None
    assert read_record(folder, edited) == RECORD
    only_file(folder)


@pytest.mark.parametrize("field", JobKey._fields)
def test_record_of_another_job_is_not_used(folder: str, field: str) -> None:
    path = kept(folder)
    other = KEY._replace(**{field: "other"})
    assert read_record(folder, other) is None
    # nor if the file's name should be the same
    os.rename(path, os.path.join(folder, hot_imports._file_name(other)))
    assert read_record(folder, other) is None


NASTY = st.text(alphabet=st.sampled_from("a.\n\\n /\udc80é\r\t$"), max_size=8)


@given(st.builds(JobKey, NASTY, NASTY, NASTY, NASTY, NASTY), st.dictionaries(st.just("m.n"), st.text()), NASTY)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_key_and_any_reason_can_be_kept(
    tmp_path: Path, key: JobKey, dropped: dict[str, str], folder: str
) -> None:
    modules = ("a.b", "no name", "c\nmodule d")
    assert write_record(os.fspath(tmp_path), key, ImportRecord(modules, dropped, folder)) == ""
    record = read_record(os.fspath(tmp_path), key)
    assert record is not None
    assert record.caches_directory == (folder if folder.startswith("/") and "\n" not in folder else "")
    assert record.modules == ("a.b",)
    assert list(record.dropped) == list(dropped)
    assert all(why.isprintable() for why in record.dropped.values())


def test_long_records_are_cut_to_what_is_read_again(folder: str) -> None:
    names = tuple(f"{'m' * 150}{index}" for index in range(MAX_MODULES + 7))
    assert write_record(folder, KEY, ImportRecord(names, {f"d{index}": "x" * 1000 for index in range(2000)})) == ""
    record = read_record(folder, KEY)
    assert record is not None
    assert record.modules == names[: len(record.modules)]
    assert len(record.modules) > 1000
    assert os.path.getsize(only_file(folder)) <= 1 << 20


def test_writing_leaves_no_other_file(folder: str) -> None:
    os.makedirs(folder, 0o700)
    os.mkdir(os.path.join(folder, hot_imports._file_name(KEY)))  # cannot be replaced by a file
    assert write_record(folder, KEY, RECORD) != ""
    assert len(os.listdir(folder)) == 1


def test_the_oldest_records_go(folder: str) -> None:
    for index in range(hot_imports._MAX_RECORDS + 10):
        assert write_record(folder, KEY._replace(target=f"/{index}/t.py"), RECORD) == ""
        newest = KEY._replace(target=f"/{index}/t.py")
    assert len(os.listdir(folder)) == hot_imports._MAX_RECORDS
    assert read_record(folder, newest) == RECORD


# ---- ages ----------------------------------------------------------------------------------------------------


def test_old_record_is_not_used(folder: str) -> None:
    path = kept(folder)
    for age_days, is_used in ((29, True), (31, False)):
        when = time.time() - age_days * DAY_S
        os.utime(path, (when, when))
        assert (read_record(folder, KEY) is not None) is is_used


def test_dropped_modules_are_tried_again(folder: str) -> None:
    def fail_at(days_ago: int) -> Callable[[bytes], bytes]:
        when = b"%d" % (time.time() - days_ago * DAY_S)
        return lambda data: b"\n".join(
            b"dropped bad.module %s it printed" % when if line.startswith(b"dropped") else line
            for line in data.split(b"\n")
        )

    path = kept(folder)
    rewrite(path, fail_at(6))
    assert read_record(folder, KEY) == RECORD
    # Keeping it does not make it younger.
    kept(folder)
    rewrite(path, lambda data: data)
    when = int(Path(path).read_text().partition("bad.module ")[2].split(" ")[0])
    assert 5.9 * DAY_S < time.time() - when < 6.1 * DAY_S
    rewrite(path, fail_at(8))
    assert read_record(folder, KEY) == RECORD._replace(dropped={})
    # It has failed anew.
    kept(folder)
    assert read_record(folder, KEY) == RECORD
    rewrite(path, fail_at(-3))  # a clock was wrong
    assert read_record(folder, KEY) == RECORD._replace(dropped={})


# ---- what is not believed ------------------------------------------------------------------------------------


def use_other_owner(path: str) -> None:
    if os.geteuid():
        pytest.skip("needs root to give a file away")
    os.chown(path, 12345, -1)


def make_symlink(path: str) -> None:
    os.rename(path, path + "2")
    os.symlink(path + "2", path)


SPOILERS: list[Callable[[str], None]] = [
    use_other_owner,
    make_symlink,
    lambda path: os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | stat.S_IWGRP),
    lambda path: os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) | stat.S_IWOTH),
]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_file_that_others_may_have_written_is_not_trusted(folder: str, spoil: Callable[[str], None]) -> None:
    path = kept(folder)
    spoil(path)
    assert read_record(folder, KEY) is None
    assert write_record(folder, KEY, RECORD) == ""  # and is replaced by one of ours
    assert read_record(folder, KEY) == RECORD


@pytest.mark.parametrize("spoil", SPOILERS)
def test_directory_that_others_may_have_written_to_is_not_trusted(
    folder: str, spoil: Callable[[str], None]
) -> None:
    kept(folder)
    spoil(folder)
    assert read_record(folder, KEY) is None
    assert write_record(folder, KEY, RECORD) != ""


def make_pipe(path: str) -> None:
    os.unlink(path)
    os.mkfifo(path, 0o600)


def make_directory(path: str) -> None:
    os.unlink(path)
    os.mkdir(path, 0o700)


@pytest.mark.parametrize("spoil", [make_pipe, make_directory, os.unlink])
def test_what_is_no_file_is_no_record(folder: str, spoil: Callable[[str], None]) -> None:
    spoil(kept(folder))
    assert read_record(folder, KEY) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"imports 2", b"imports 1"),
        lambda data: data.replace(b"end\n", b"unknown x\nend\n"),
        lambda data: data.replace(b"end\n", b"\nend\n"),
        lambda data: data + b"module more\n",
        lambda data: data.replace(b"end\n", b"module x\n" * 200_000 + b"end\n"),
        lambda data: b"",
    ],
)
def test_spoiled_file_is_no_record(folder: str, change: Callable[[bytes], bytes]) -> None:
    rewrite(kept(folder), change)
    assert read_record(folder, KEY) is None


def test_cut_off_file_is_no_record(folder: str) -> None:
    path = kept(folder)
    whole = Path(path).read_bytes()
    for length in range(len(whole)):
        Path(path).write_bytes(whole[:length])
        assert read_record(folder, KEY) is None


@pytest.mark.parametrize(
    "line",
    [
        b"module a;b",
        b"module ../x",
        b"module ",
        b"module a b",
        b"module a.\xff",
        b"module " + b"a" * 201,
        b"dropped a-b 1 why",
        b"dropped a soon why",
        b"dropped a",
        b"dropped a -1 why",
        b"dropped a \xb2 why",
        b"",
    ],
)
def test_one_bad_line_spoils_all(folder: str, line: bytes) -> None:
    rewrite(kept(folder), lambda data: data.replace(b"end\n", line + b"\nend\n"))
    assert read_record(folder, KEY) is None


@given(st.binary(max_size=300), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_content_raises(tmp_path: Path, junk: bytes, has_header: bool) -> None:
    folder = os.fspath(tmp_path / "imports")
    path = kept(folder)
    header = Path(path).read_bytes().partition(b"dropped")[0] if has_header else b""
    Path(path).write_bytes(header + junk + b"\nend\n")
    read_record(folder, KEY)
    assert write_record(folder, KEY, RECORD) == ""


def test_no_directory(tmp_path: Path) -> None:
    assert read_record("", KEY) is None
    assert "BOOTSEER_CACHE_DIR" in write_record("", KEY, RECORD)
    (tmp_path / "file").write_text("")
    below_file = os.fspath(tmp_path / "file" / "imports")
    assert read_record(below_file, KEY) is None
    assert write_record(below_file, KEY, RECORD) != ""
    assert write_record("/a\0b", KEY, RECORD) != ""
    assert read_record("/a\0b", KEY) is None


# ---- keys and folders ----------------------------------------------------------------------------------------


def test_key_of_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    missing = make_key("python", "script", "train.py")
    assert missing == JobKey("python", "script", os.fspath(tmp_path / "train.py"), "", "")
    (tmp_path / "train.py").write_text("1")
    key = make_key("python", "script", "train.py")
    assert key == make_key("python", "script", os.fspath(tmp_path / "train.py"))
    assert key.stamp
    (tmp_path / "train.py").write_text("12")
    assert make_key("python", "script", "train.py").stamp != key.stamp
    assert make_key("python", "script", "a\0b").stamp == ""


def test_key_of_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert make_key("python", "module", "pkg.train") == JobKey(
        "python", "module", "pkg.train", os.fspath(tmp_path), ""
    )


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"BOOTSEER_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/c/imports"),
        ({"BOOTSEER_CACHE_DIR": "", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/bootseer/imports"),
        ({"XDG_CACHE_HOME": "x", "HOME": "/h"}, "/h/.cache/bootseer/imports"),
        ({"HOME": "h"}, ""),
        ({}, ""),
    ],
)
def test_cache_dir(environ: dict[str, str], folder: str) -> None:
    assert cache_dir(environ) == folder


def test_relative_cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cache_dir({"BOOTSEER_CACHE_DIR": "c"}) == os.fspath(tmp_path / "c/imports")


# ---- what a rank has written ---------------------------------------------------------------------------------


def test_listing(tmp_path: Path) -> None:
    path = tmp_path / "rank0.imports"
    assert read_listing(os.fspath(path)) == []
    path.write_bytes(b"sys\tbuilt-in\njson\t/lib/json.py\n\nodd\nthree\ta\tb\n\xff\t/x\ntorch\t/lib/tor")
    assert read_listing(os.fspath(path)) == [("sys", "built-in"), ("json", "/lib/json.py"), ("\udcff", "/x")]
    path.write_bytes(b"json\t/lib/json.py\n" * 600_000)
    assert read_listing(os.fspath(path)) == []
    assert read_listing(os.fspath(tmp_path)) == []
    os.mkfifo(tmp_path / "pipe")
    assert read_listing(os.fspath(tmp_path / "pipe")) == []
