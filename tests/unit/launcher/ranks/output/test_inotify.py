"""The watch on files, with the kernel's own limits."""

import os

import pytest

from launcher.ranks.output.inotify import ALL, Inotify


@pytest.fixture
def inotify():
    inotify = Inotify()
    yield inotify
    inotify.close()


def test_news_come_once_for_many_writes(inotify, tmp_path):
    with open(tmp_path / "a", "ab", buffering=0) as file:
        watch = inotify.watch(str(tmp_path / "a"))
        assert inotify.watch(str(tmp_path / "a")) == watch
        assert inotify.read() == set()
        for _ in range(100):
            file.write(b"x")
        assert inotify.read() == {watch}
        assert inotify.read() == set()
        inotify.unwatch(watch)
        file.write(b"x")
        assert inotify.read() == set()


def test_a_missing_file_is_an_error(inotify, tmp_path):
    with pytest.raises(FileNotFoundError):
        inotify.watch(str(tmp_path / "none"))


def test_events_lost_by_the_kernel_are_reported(inotify, tmp_path):
    with open("/proc/sys/fs/inotify/max_queued_events") as limit:
        most = int(limit.read())
    if most > 100_000:
        pytest.skip(f"the queue holds {most} events")
    fds = [os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT) for name in "ab"]
    watches = {inotify.watch(str(tmp_path / name)) for name in "ab"}
    for _ in range(most // 2 + 1):  # in turn, because the same event twice is told once
        for fd in fds:
            os.write(fd, b"x")
    found = set()
    while news := inotify.read():
        found |= news
    assert found == {ALL, *watches}
    for fd in fds:
        os.close(fd)
