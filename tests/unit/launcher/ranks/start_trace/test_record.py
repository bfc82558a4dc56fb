"""Records of starts: kept and read again, and what is not believed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher.ranks.start_trace.files import (
    START_DIRECTORY,
    START_SUFFIX,
    JobKey,
    exists,
    make_start_key,
    records_dir,
)
from launcher.ranks.start_trace.plan import DIRECTORY, FILE, NAME, SMALL, CacheProbe, PrefetchEntry
from launcher.ranks.start_trace.record import AGE_S, forget_record, read_record, write_record

KEY = JobKey("/usr/bin/python3", "script", "/home/me/train.py", "", "")
ENTRIES = [
    PrefetchEntry(DIRECTORY, "/lib"),
    PrefetchEntry(NAME, "/lib/os.py"),
    PrefetchEntry(SMALL, "/lib/re.py"),
    PrefetchEntry(FILE, "/lib/os.pyc", 100, 1_795_000_000_000_000_000),
    PrefetchEntry(FILE, "/lib/a b\udcff.so", 1 << 40, 5, ((0, 1), (77, 8))),
]


PROBES = [CacheProbe("/lib/os.pyc", 0, 100, 5), CacheProbe("/lib/a b\udcff.so", 4096, 1 << 40, -5)]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return os.fspath(tmp_path / "cache" / "starts")


def kept(folder: str) -> Path:
    assert write_record(folder, KEY, ENTRIES, PROBES) == ""
    (name,) = os.listdir(folder)
    return Path(folder, name)


def test_a_record_is_kept(folder: str) -> None:
    assert not exists(folder, KEY, START_SUFFIX)
    assert read_record(folder, KEY) is None
    path = kept(folder)
    record = read_record(folder, KEY)
    assert record is not None
    assert exists(folder, KEY, START_SUFFIX)
    assert list(record.entries()) == ENTRIES
    assert list(record.probes) == PROBES
    assert path.stat().st_mode & 0o777 == 0o600
    forget_record(folder, KEY)
    assert not exists(folder, KEY, START_SUFFIX)
    forget_record(folder, KEY)


def test_an_edited_script_keeps_its_record(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("one")
    before = make_start_key("python", "script", os.fspath(script))
    script.write_text("another")
    assert make_start_key("python", "script", os.fspath(script)) == before


def test_records_lie_beside_those_of_imports() -> None:
    assert records_dir({"HOME": "/home/me"}, START_DIRECTORY) == "/home/me/.cache/bootseer/starts"
    assert records_dir({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, START_DIRECTORY) == "/x/bootseer/starts"
    assert records_dir({}, START_DIRECTORY) == ""
    assert write_record("", KEY, ENTRIES, PROBES) != ""
    assert read_record("", KEY) is None
    assert not exists("", KEY, START_SUFFIX)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.replace(b"start 1", b"start 2"),
        lambda data: data.replace(b"train.py", b"other.py"),
        lambda data: data.replace(b"os.pyc", b"os.pyx"),  # the checksum is another
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data.replace(b"probes 2", b"probes -2"),
        lambda data: data.replace(b"probes 2", b"probes ffff"),
        lambda data: data.replace(b"probes 2", b"probes 3"),
        lambda data: data.replace(b"check ", b"check x"),
        lambda data: data + b"x" * (9 << 20),
    ],
)
def test_a_spoiled_file_is_no_record(folder: str, change: Callable[[bytes], bytes]) -> None:
    path = kept(folder)
    path.write_bytes(change(path.read_bytes()))
    assert read_record(folder, KEY) is None
    assert write_record(folder, KEY, ENTRIES, PROBES) == ""
    assert read_record(folder, KEY) is not None


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_what_others_may_have_written_is_not_trusted(folder: str, mode: int) -> None:
    path = kept(folder)
    path.chmod(mode)
    assert read_record(folder, KEY) is None


def test_old_records_are_not_used(folder: str) -> None:
    path = kept(folder)
    when = time.time() - AGE_S - 60
    os.utime(path, (when, when))
    assert read_record(folder, KEY) is None
