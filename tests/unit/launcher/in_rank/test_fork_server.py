"""What the preloaded process finds about itself, where no process is needed to see it."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launcher.in_rank import fork_server as fork_server
from launcher.in_rank import store_gate

LINE = "7f0000000000-7f0000001000 rw-s 00000000 00:05 42                         {}\n"


@pytest.mark.parametrize(
    "path",
    [
        *("/dev/nvidia0", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dri/renderD128", "/dev/dxg", "/dev/accel/accel0"),
        *("/dev/vfio/17", "/dev/neuron0", "/dev/infiniband/uverbs0", "/dev/davinci_manager", "/dev/hl0"),
    ],
)
def test_a_mapped_device_is_found(path: str) -> None:
    maps = LINE.format("/usr/lib/libc.so.6") + LINE.format("/dev/shm/arena") + LINE.format(path)
    assert fork_server._mapped_device(maps.encode()) == path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "[heap]",
        "/dev/zero (deleted)",
        "/dev/shm/torch_1",
        "/opt/dev/nvidia0",
        "/mnt/a /dev-b",
        "/SYSV0 (deleted)",
    ],
)
def test_what_a_fork_survives_is_no_device(path: str) -> None:
    assert fork_server._mapped_device(LINE.format(path).encode()) == ""


def _edit(directory: Path) -> None:
    (directory / "a/one.py").write_text("other\n")


def _edit_mapped(directory: Path) -> None:
    with open(directory / "a/one.py", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        mapped[0:1] = b"O"


def _edit_by_another_name(directory: Path) -> None:
    with open(directory / "link.py", "a") as file:
        file.write("more\n")


def _exchange(directory: Path) -> None:
    (directory / "new").write_text("one\n")
    os.replace(directory / "new", directory / "a/one.py")


def _remove(directory: Path) -> None:
    (directory / "a/two.so").unlink()


def _exchange_directory(directory: Path) -> None:
    (directory / "a").rename(directory / "was")
    shutil.copytree(directory / "was", directory / "a")


def _exchange_above(directory: Path) -> None:
    """The watched folder itself has not moved, and nothing in it was touched."""
    shutil.copytree(directory / "top", directory / "other")
    (directory / "top").rename(directory / "was")
    (directory / "other").rename(directory / "top")


CHANGES: list[tuple[Callable[[Path], None], str]] = [
    (_edit, "a/one.py"),
    (_edit_mapped, "a/one.py"),
    (_edit_by_another_name, "a/three.py"),
    (_exchange, "a/one.py"),
    (_remove, "a/two.so"),
    (_exchange_directory, "a/"),
    (_exchange_above, "top/below/four.py"),
]


@pytest.fixture(params=["watched", "looked at"])
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fork_server._Files:
    (tmp_path / "a").mkdir()
    (tmp_path / "top/below").mkdir(parents=True)
    for name in ("a/one.py", "a/two.so", "a/three.py", "top/below/four.py"):
        (tmp_path / name).write_text(name + "\n")
        os.utime(tmp_path / name, (1e9, 1e9))
    os.link(tmp_path / "a/three.py", tmp_path / "link.py")
    if request.param == "looked at":
        monkeypatch.setattr(fork_server, "LOCAL", frozenset())
    files = fork_server._Files(ctypes, fork_server._load_libc(ctypes))
    files.take(f"{path}" for path in tmp_path.rglob("*.*") if path.name != "link.py")
    request.addfinalizer(lambda: os.close(files.fd))
    return files


@pytest.mark.parametrize("checks", [0, 1])  # before the change
@pytest.mark.parametrize(("change", "name"), CHANGES, ids=[change.__name__ for change, _ in CHANGES])
def test_a_file_that_has_changed_is_found(
    files: fork_server._Files, tmp_path: Path, change: Callable[[Path], None], name: str, checks: int
) -> None:
    for _ in range(checks):
        assert files.find_change() == ""
    change(tmp_path)
    for _ in range(2):  # it is asked again before ranks are exec'd
        assert files.find_change().startswith(f"{tmp_path}/{name}")


def test_what_is_beside_a_file_does_not_matter(files: fork_server._Files, tmp_path: Path) -> None:
    (tmp_path / "a/__pycache__").mkdir()
    (tmp_path / "a/log.txt").write_text("new\n")
    assert files.find_change() == ""
    assert files.find_change() == ""


def test_where_the_kernel_tells_nobody_looks(
    files: fork_server._Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def stat(path: object, *, dir_fd: int | None = None) -> os.stat_result:
        seen.append(path)
        return os.lstat(path, dir_fd=dir_fd)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "stat", stat)
    assert files.find_change() == ""
    if fork_server.LOCAL:
        assert len(seen) == 2  # the folders
    else:
        assert sorted(seen) == [b"four.py", b"one.py", b"three.py", b"two.so"]  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("flags", "runs"),
    [
        (b"", []),
        (b"\0\0", []),
        (b"\1", [(0, 1)]),
        (b"\0\1\1\0\1", [(1, 3), (4, 5)]),
        (b"\1\0\1", [(0, 1), (2, 3)]),
    ],
)
def test_runs(flags: bytes, runs: list[tuple[int, int]]) -> None:
    assert list(fork_server._runs(flags)) == runs


@pytest.mark.parametrize("cap", [fork_server.MAX_COPIED_PAGES, 1 << 30])
def test_pages_that_a_rank_has_copied_are_learned(cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of memory that it shares with this process it has written to the second page, and read of a file.

    This process is so large that the lower pages alone may use up the cap.
    """
    monkeypatch.setattr(fork_server, "MAX_COPIED_PAGES", cap)
    process = fork_server._Preloaded.__new__(fork_server._Preloaded)
    page = mmap.PAGESIZE
    shared = mmap.mmap(-1, 4 * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    place = ctypes.addressof(ctypes.c_char.from_buffer(shared))
    ctypes.CDLL(None).madvise(ctypes.c_void_p(place), ctypes.c_size_t(4 * page), 15)  # MADV_NOHUGEPAGE
    shared[:] = b"x" * len(shared)
    ready, telling = os.pipe()
    waiting, go = os.pipe()
    pid = os.fork()
    if pid == 0:
        shared[page] = ord("y")
        os.write(telling, b"!")
        os.read(waiting, 1)
        os._exit(0)
    try:
        os.read(ready, 1)
        process.first_pid = pid
        process._learn()
    finally:
        os.write(go, b"!")
        os.waitpid(pid, 0)
        for fd in (ready, telling, waiting, go):
            os.close(fd)
    copied_bytes = sum(size for _, size in process.copied)
    assert (place + page, page) in process.copied or copied_bytes == cap * page
    assert not any(start <= place < start + size for start, size in process.copied)
    assert copied_bytes <= cap * page
    assert process.read and all(size % page == 0 for _, size in process.read)


def test_nothing_is_learned_of_a_rank_that_has_ended() -> None:
    process = fork_server._Preloaded.__new__(fork_server._Preloaded)
    process.first_pid = 1 << 22
    process._learn()
    assert (process.read, process.copied) == ([], [])


@pytest.fixture
def gated() -> Any:
    """A preloaded process that can wait for a listener."""
    process = fork_server._Preloaded.__new__(fork_server._Preloaded)
    process.gate, process.socket = vars(store_gate), socket
    return process


def test_a_rank_that_has_not_begun_is_waited_for(gated: Any) -> None:
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("127.0.0.1", 0))
        asked_s: list[float] = []

        def has_begun() -> bool:
            asked_s.append(time.monotonic())
            is_late = asked_s[-1] - asked_s[0] > 2 * fork_server.MAX_HEAD_START_S
            if is_late:
                store.listen()
            return is_late

        gated._await_listener(store.getsockname()[1], has_begun)
        assert asked_s[-1] - asked_s[0] > 2 * fork_server.MAX_HEAD_START_S


def test_a_rank_that_has_begun_and_does_not_listen_is_waited_for_a_moment(gated: Any) -> None:
    with socket.socket() as store:
        store.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        store.bind(("127.0.0.1", 0))
        asked = 0

        def has_begun() -> bool:
            nonlocal asked
            asked += 1
            return True

        began_s = time.monotonic()
        gated._await_listener(store.getsockname()[1], has_begun)
        assert time.monotonic() - began_s >= fork_server.MAX_HEAD_START_S and asked == 1
