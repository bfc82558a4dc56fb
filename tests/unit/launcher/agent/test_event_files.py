"""Event files as they grow, shrink, vanish, are exchanged, or hold half a line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.agent.event_files import TAKE_BYTES, EventFile
from launcher.rendezvous.event_batch import DropCounts


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-0.jsonl"


def append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def take_all(file: EventFile, drops: DropCounts) -> list[bytes]:
    found: list[bytes] = []
    while file.behind():
        lines, taken = file.take(drops)
        found += lines
        if not taken:
            break
    return found


def test_what_comes_is_taken_once(path: Path) -> None:
    file, drops = EventFile(os.fspath(path)), DropCounts()
    assert file.behind() == 0 and file.take(drops) == ([], 0)
    append(path, b"one\ntwo\n")
    assert file.behind() == 8
    assert file.take(drops) == ([b"one", b"two"], 8)
    assert file.behind() == 0
    append(path, b"three\n")
    assert take_all(file, drops) == [b"three"]


def test_what_an_older_run_left_is_not_taken(path: Path) -> None:
    append(path, b"old\nhalf of an old li")
    file, drops = EventFile(os.fspath(path)), DropCounts()
    append(path, b"new\n")
    assert take_all(file, drops) == [b"new"]


def test_half_a_line_waits_for_its_end(path: Path) -> None:
    file, drops = EventFile(os.fspath(path)), DropCounts()
    append(path, b"one\ntw")
    assert take_all(file, drops) == [b"one"]
    append(path, b"o\n")
    assert take_all(file, drops) == [b"two"]
    append(path, b"cut off")
    assert take_all(file, drops) == []
    file.end(drops)
    assert drops.told() == (0, 0, 0, 1)


def test_a_file_that_shrinks_or_is_another_one_is_read_from_its_start(path: Path) -> None:
    file, drops = EventFile(os.fspath(path)), DropCounts()
    append(path, b"one\ntwo\nthree\n")
    take_all(file, drops)
    os.truncate(path, 0)
    append(path, b"four\n")
    assert take_all(file, drops) == [b"four"]
    other = path.with_name("other")
    append(other, b"five is longer than all before\n")
    os.rename(other, path)
    assert take_all(file, drops) == [b"five is longer than all before"]


def test_a_file_that_vanishes_may_come_back(path: Path) -> None:
    file, drops = EventFile(os.fspath(path)), DropCounts()
    append(path, b"one\n")
    take_all(file, drops)
    path.unlink()
    assert file.behind() == 0 and file.take(drops) == ([], 0)
    append(path, b"two is longer\n")
    assert take_all(file, drops) == [b"two is longer"]


def test_what_is_no_plain_file_is_left_alone(path: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"a\nb\n")
    path.symlink_to(secret)
    file, drops = EventFile(os.fspath(path)), DropCounts()
    append(secret, b"c\n")
    assert file.behind() == 0 and file.take(drops) == ([], 0)
    path.unlink()
    os.mkfifo(path)
    assert file.behind() == 0 and file.take(drops) == ([], 0)  # and nobody waits for a writer
    path.unlink()
    path.mkdir()
    assert file.behind() == 0 and file.take(drops) == ([], 0)


def test_a_line_without_an_end_is_passed_over(path: Path) -> None:
    file, drops = EventFile(os.fspath(path)), DropCounts()
    append(path, b"x" * (3 * TAKE_BYTES))
    assert take_all(file, drops) == []
    append(path, b"x\nnext\n")
    assert take_all(file, drops) == [b"next"]
    assert drops.told() == (0, 1, 0, 0)


def test_what_is_skipped_is_counted(path: Path) -> None:
    file, drops = EventFile(os.fspath(path)), DropCounts()
    append(path, b"12345\n" * 1000)
    assert file.skip(3 * 1024, drops) == 3 * 1024
    assert len(take_all(file, drops)) + drops.unread == 1000
    assert drops.told() == (0, 0, 512, 0)
    append(path, b"last\nhalf")
    assert file.skip(10**9, drops) == 9
    file.end(drops)
    assert drops.told() == (0, 0, 513, 1)


@given(
    st.lists(st.integers(0, 3000), max_size=60),
    st.lists(st.tuples(st.booleans(), st.integers(1, 60_000)), max_size=8),
)
def test_every_line_is_taken_or_counted(
    tmp_path_factory, lengths: list[int], steps: list[tuple[bool, int]]
) -> None:
    path = tmp_path_factory.mktemp("events") / "file"
    file, drops = EventFile(os.fspath(path)), DropCounts()
    lines = [str(number).encode() + b"x" * length for number, length in enumerate(lengths)]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    found: list[bytes] = []
    for is_skip, size in steps:
        if is_skip:
            file.skip(size, drops)
        elif file.behind():
            found += file.take(drops)[0]
    found += take_all(file, drops)
    file.end(drops)
    assert len(found) + drops.unread == len(lines)
    assert drops.torn == 0
    assert [line for line in lines if line in found] == found
