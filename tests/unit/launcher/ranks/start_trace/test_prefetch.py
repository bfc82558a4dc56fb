"""What is read ahead and what is left alone: files that have changed, are none, cannot be read; memory; end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bootseer.linux import page_cache
from bootseer.linux.page_cache import cached_share
from launcher.ranks.start_trace.files import JobKey
from launcher.ranks.start_trace.plan import (
    DIRECTORY,
    FILE,
    NAME,
    PIECE_BYTES,
    SMALL,
    SMALL_BYTES,
    CacheProbe,
    PrefetchEntry,
    parse_entries,
)
from launcher.ranks.start_trace.prefetch import Prefetch, is_warm, run
from launcher.ranks.start_trace.record import write_record
from tests.support import wait_until

KEY = JobKey("/usr/bin/python3", "script", "/home/me/train.py", "", "")
PLENTY = 1 << 30


def make(path: Path, size: int) -> PrefetchEntry:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(size))
    return entry_of(path)


def entry_of(path: Path, ranges: tuple[tuple[int, int], ...] = ()) -> PrefetchEntry:
    status = path.stat()
    return PrefetchEntry(FILE, os.fspath(path), status.st_size, status.st_mtime_ns, ranges)


def make_cold(*paths: Path) -> None:
    for path in paths:
        wait_until(lambda path=path: forget(path), 10, f"{path} stays in memory")  # type: ignore[misc]


def forget(path: Path) -> bool:
    """Whether nothing of it is in memory any more; what was written just now may take a moment."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return cached_share(fd, 0, os.fstat(fd).st_size) == 0
    finally:
        os.close(fd)


def is_cached(path: Path, offset: int) -> bool:
    fd = os.open(path, os.O_RDONLY)
    try:
        return cached_share(fd, offset, 1) > 0
    finally:
        os.close(fd)


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A folder of a file system that forgets what it has in memory when it is asked to."""
    if page_cache.is_in_memory(os.fspath(tmp_path)):
        pytest.skip("tmpfs keeps all of its files in memory: there is nothing to be read ahead")
    return tmp_path


def read(*entries: PrefetchEntry, max_bytes: int = PLENTY) -> dict[str, object]:
    prefetch = Prefetch(iter(entries), max_bytes)
    prefetch.run(time.monotonic() + 30)
    return prefetch.figures()


# ---- what is read --------------------------------------------------------------------------------------------


def test_files_are_in_memory_afterwards(disk: Path) -> None:
    small, large = disk / "a/small.pyc", disk / "a/large.so"
    entries = [make(small, 3000), make(large, 3 * PIECE_BYTES + 5)]
    make_cold(small, large)
    figures = read(
        PrefetchEntry(DIRECTORY, os.fspath(disk / "a")), PrefetchEntry(NAME, os.fspath(small)), *entries
    )
    assert figures["files"] == 2
    assert figures["folders"] == figures["names"] == 1
    assert figures["bytes"] == 3000 + 3 * PIECE_BYTES + 5
    assert figures["changed"] == figures["missing"] == 0
    assert is_cached(small, 0)
    for offset in (0, PIECE_BYTES + 70_000, 3 * PIECE_BYTES + 4):
        assert is_cached(large, offset)


def test_of_a_library_only_the_recorded_parts_are_read(disk: Path) -> None:
    path = disk / "lib.so"
    make(path, 64 << 20)
    make_cold(path)
    figures = read(entry_of(path, ((4096, 256),)))  # a megabyte at 16 MiB
    assert figures["bytes"] == 1 << 20
    assert is_cached(path, 16 << 20)
    assert not is_cached(path, 60 << 20)
    assert not is_cached(path, 0)


def test_a_small_file_is_read_as_it_is(disk: Path) -> None:
    path, source = disk / "__pycache__/a.cpython-311.pyc", disk / "a.py"
    make(path, 20_000)
    make(source, 10)
    large = Path(make(disk / "large.py", SMALL_BYTES + 1).path)
    make_cold(path, large)
    figures = read(
        PrefetchEntry(SMALL, os.fspath(path)),
        PrefetchEntry(SMALL, os.fspath(large)),
        PrefetchEntry(SMALL, "/nowhere.py"),
    )
    assert [figures[name] for name in ("files", "bytes", "changed", "missing")] == [1, 20_000, 1, 1]
    assert is_cached(path, 0)


# ---- what is left alone --------------------------------------------------------------------------------------


def grow(path: Path) -> None:
    path.write_bytes(b"more" * 5000)


def touch(path: Path) -> None:
    os.utime(path, (1, 1))


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_link_to_pipe(path: Path) -> None:
    os.mkfifo(path.parent / "pipe")
    path.unlink()
    path.symlink_to("pipe")


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("change", [grow, touch, make_pipe, make_link_to_pipe, make_directory])
def test_what_is_not_as_it_was_is_left_alone(tmp_path: Path, change: Callable[[Path], None]) -> None:
    entry = make(tmp_path / "it", 10_000)
    other = make(tmp_path / "other", 10)
    change(tmp_path / "it")
    figures = read(entry, other)
    assert (figures["changed"], figures["files"], figures["bytes"]) == (1, 1, 10)


def test_a_link_to_the_recorded_file_is_followed(tmp_path: Path) -> None:
    entry = make(tmp_path / "target", 10)
    (tmp_path / "link").symlink_to("target")
    assert read(entry._replace(path=os.fspath(tmp_path / "link")))["files"] == 1


def test_what_is_gone_is_counted(tmp_path: Path) -> None:
    gone = make(tmp_path / "gone", 10)
    os.unlink(gone.path)
    figures = read(gone, PrefetchEntry(DIRECTORY, "/nowhere/at/all"), PrefetchEntry(NAME, "/nowhere/at/all.py"))
    assert figures["missing"] == 1  # only files: names come and go


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_cannot_be_read_is_counted(tmp_path: Path) -> None:
    entry = make(tmp_path / "secret", 10)
    os.chmod(entry.path, 0)
    assert read(entry)["missing"] == 1


def test_ranges_past_the_end_are_left_out(tmp_path: Path) -> None:
    make(tmp_path / "it", 10)
    figures = read(entry_of(tmp_path / "it", ((0, 1), (1 << 50, 1 << 50))))
    assert (figures["files"], figures["bytes"]) == (1, 10)


# ---- bounds --------------------------------------------------------------------------------------------------


def test_it_stops_when_memory_is_taken(tmp_path: Path) -> None:
    entries = [make(tmp_path / str(number), 100_000) for number in range(30)]
    figures = read(*entries, max_bytes=1_000_000)
    assert figures["why"] == "half of the free memory is used"
    assert 0 < int(str(figures["bytes"])) <= 1_000_000


def test_it_stops_after_its_time(tmp_path: Path) -> None:
    entry = make(tmp_path / "it", 10)

    def endless() -> Iterator[PrefetchEntry]:
        while True:
            yield entry

    prefetch = Prefetch(endless(), PLENTY)
    prefetch.run(time.monotonic() + 0.1)
    assert "time limit" in str(prefetch.figures()["why"])
    assert int(str(prefetch.figures()["files"])) > 0


def test_what_comes_before_a_damaged_line_is_read(tmp_path: Path) -> None:
    make(tmp_path / "it", 10)
    status = (tmp_path / "it").stat()
    lines = [f"at {tmp_path}", f"f 0 10 {status.st_mtime_ns} * it", "damaged", f"f 0 10 {status.st_mtime_ns} * it"]
    prefetch = Prefetch(parse_entries(lines), PLENTY)
    prefetch.run(time.monotonic() + 30)
    assert prefetch.figures()["files"] == 1
    assert "line" in str(prefetch.figures()["why"])


# ---- warm ----------------------------------------------------------------------------------------------------


def probe(path: Path) -> CacheProbe:
    return CacheProbe(os.fspath(path), 0, path.stat().st_size, 0)


def test_what_is_in_memory_is_not_read_again(disk: Path) -> None:
    paths = [disk / f"{number}.pyc" for number in range(8)]
    entries = [make(path, 5000) for path in paths]
    for path in paths:
        path.read_bytes()
    assert is_warm(map(probe, paths))
    directory = os.fspath(disk / "records")
    assert write_record(directory, KEY, entries, [probe(path) for path in paths]) == ""
    assert run(directory, *KEY)["why"] == "all files are in memory"
    make_cold(paths[0])
    assert is_warm(map(probe, paths))  # a single page may have been given up
    make_cold(*paths)
    assert not is_warm(map(probe, paths))
    found = run(directory, *KEY)
    assert (found["why"], found["files"]) == ("", 8)
    assert all(is_cached(path, 0) for path in paths)


@pytest.mark.parametrize("has_cachestat", [True, False])
def test_a_disk_that_answers_at_once_is_not_memory(
    disk: Path, monkeypatch: pytest.MonkeyPatch, has_cachestat: bool
) -> None:
    """Where the kernel looks again after it has begun to fetch, up to half of such reads get their byte."""
    probes = [probe(Path(make(disk / f"{number}", 9000).path)) for number in range(100)]
    for number in range(0, 100, 5):
        few = probes[number : number + 5]
        make_cold(*(Path(each.path) for each in few))
        with monkeypatch.context() as patch:
            if not has_cachestat:
                patch.setattr(page_cache, "_has_cachestat", False)
            assert not is_warm(few)


def test_nothing_to_look_at_is_not_warm(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    os.mkdir(tmp_path / "folder")
    places = [tmp_path / "pipe", tmp_path / "folder", tmp_path / "gone"]
    assert not is_warm([])
    assert not is_warm([CacheProbe(os.fspath(path), 1 << 62, 1, 1) for path in places * 3])


def test_without_a_record_there_is_nothing_to_do(tmp_path: Path) -> None:
    assert "no usable record" in str(run(os.fspath(tmp_path), *KEY)["why"])
