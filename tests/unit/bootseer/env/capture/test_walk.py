"""Walks of folders on disk: everything is seen as `lstat` sees it, and nothing is followed."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from bootseer.env.capture import walk as walking
from bootseer.env.capture.walk import walk
from bootseer.errors import ConfigError


def listed(directory: Path) -> set[bytes]:
    root = os.fsencode(directory)
    found = {b""}
    for above, directories, files in os.walk(root):
        found |= {os.path.relpath(os.path.join(above, name), root) for name in (*directories, *files)}
    return found


def test_everything_is_there_as_lstat_has_it(tmp_path: Path) -> None:
    (tmp_path / "folder" / "below").mkdir(parents=True)
    (tmp_path / "folder" / "file").write_bytes(b"x" * 5)
    os.link(tmp_path / "folder" / "file", tmp_path / "other name")
    os.utime(tmp_path / "folder" / "file", ns=(1, 1_700_000_000_123_456_789))
    (tmp_path / "link").symlink_to("/nowhere/at all")
    (tmp_path / "to folder").symlink_to("folder")
    os.mkfifo(tmp_path / "fifo")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")).write_bytes(b"")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(tmp_path / "socket"))
        found = walk(os.fspath(tmp_path))
    assert found.keys() == listed(tmp_path)
    for path, entry in found.items():
        now = os.lstat(os.path.join(os.fsencode(tmp_path), path))
        size = 0 if stat.S_ISDIR(now.st_mode) else now.st_size
        assert entry[:9] == (
            *(now.st_mode, now.st_uid, now.st_gid, size, now.st_mtime_ns, now.st_ctime_ns),
            *(now.st_ino, now.st_dev, now.st_nlink),
        )
        assert entry.target == (
            os.fsencode(os.readlink(tmp_path / os.fsdecode(path))) if stat.S_ISLNK(entry.mode) else b""
        )
    assert found[b"folder/file"].mtime_ns == 1_700_000_000_123_456_789
    paths = list(found)
    for path in paths[1:]:
        assert paths.index(path.rpartition(b"/")[0]) < paths.index(path)


def test_target_that_is_not_there_is_empty(tmp_path: Path) -> None:
    assert walk(os.fspath(tmp_path / "nowhere")) == {}


def test_target_may_be_a_link_to_a_directory(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").touch()
    (tmp_path / "link").symlink_to("folder")
    assert walk(os.fspath(tmp_path / "link")) == walk(os.fspath(tmp_path / "folder"))


def test_target_that_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file: is not a directory"):
        walk(os.fspath(tmp_path / "file"))


def test_deeper_than_a_path_may_be_long(tmp_path: Path) -> None:
    """5,000 bytes: no path leads there at once."""
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(20):
        os.mkdir("x" * 250, dir_fd=fd)
        below = os.open("x" * 250, os.O_RDONLY | os.O_DIRECTORY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    found = walk(os.fspath(tmp_path))
    assert len(found) == 21
    assert max(map(len, found)) > 5000


def test_other_file_systems_are_not_entered() -> None:
    """/dev/shm is another file system than /dev: no mount has to be made for this."""
    if os.stat("/dev").st_dev == os.stat("/dev/shm").st_dev:
        pytest.skip("/dev/shm is no file system of its own")
    found = walk("/dev")
    assert b"shm" in found
    assert not any(path.startswith(b"shm/") for path in found)


def test_what_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "kept" / "cache").mkdir(parents=True)
    (tmp_path / "cache" / "below").mkdir(parents=True)
    found = walk(os.fspath(tmp_path), without=frozenset({b"cache"}))
    assert found.keys() == {b"", b"kept", b"kept/cache"}


@pytest.mark.parametrize("becomes", ["nothing", "file", "link"])
def test_what_vanishes_meanwhile_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
) -> None:
    """Between the look at its name and the look into it."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "secret").touch()
    target = tmp_path / "target"
    (target / "goes").mkdir(parents=True)
    (target / "stays").mkdir()
    look_into = walking._list_directory

    def look_and_remove(fd: int, above: bytes, without: frozenset[bytes], found: walking.Walk) -> list[bytes]:
        names = look_into(fd, above, without, found)
        if not above:
            (target / "goes").rmdir()
            if becomes == "file":
                (target / "goes").touch()
            if becomes == "link":
                (target / "goes").symlink_to(tmp_path / "elsewhere")
        return names

    monkeypatch.setattr(walking, "_list_directory", look_and_remove)
    assert walk(os.fspath(target)).keys() == {b"", b"stays"}


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walking, "MAX_ENTRIES", 2)
    for number in range(4):
        (tmp_path / f"folder{number}").mkdir()
    with pytest.raises(ConfigError, match="more than 2 files"):
        walk(os.fspath(tmp_path))


def test_no_descriptor_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a" / "b" / "c").mkdir(parents=True)
    before = os.listdir("/proc/self/fd")
    walk(os.fspath(tmp_path))
    look_into, count = walking._list_directory, 0

    def fail(*args: object) -> list[bytes]:
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError
        return look_into(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(walking, "_list_directory", fail)
    with pytest.raises(RuntimeError):
        walk(os.fspath(tmp_path))
    assert os.listdir("/proc/self/fd") == before
