"""The directory of the checkpoint service is removed after any error, and children that hang are left behind."""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bootseer.checkpoint.service import process
from bootseer.checkpoint.service.process import (
    DIRECTORY,
    Child,
    close_inherited,
    end_child,
    fork_child,
    make_directory,
    sweep,
)
from bootseer.ipc.channel import Channel
from bootseer.linux import child_processes


def test_a_directory_that_cannot_be_locked_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_fd: int, _how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(process.fcntl, "flock", refuse)
    with pytest.raises(OSError, match="No locks available"):
        make_directory(str(tmp_path))
    assert os.listdir(tmp_path) == []
    assert os.listdir("/proc/self/fd") == before


def test_what_a_service_left_that_was_killed_at_its_start_is_removed(tmp_path: Path) -> None:
    for name, age_s in (("fresh", 0.0), ("old", 2 * process.UNFINISHED_S)):
        directory = tmp_path / f"{DIRECTORY}{name}"
        directory.mkdir()
        (directory / "lock.new").touch()
        at_s = time.time() - age_s
        os.utime(directory, (at_s, at_s))
    sweep(str(tmp_path))
    assert os.listdir(tmp_path) == [f"{DIRECTORY}fresh"]


def test_a_directory_in_use_stays(tmp_path: Path) -> None:
    directory, lock = make_directory(str(tmp_path))
    sweep(str(tmp_path))
    assert os.path.isdir(directory)
    os.close(lock)
    sweep(str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """A child that no signal reaches before the end of the test."""
    kill, pid = os.kill, os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    monkeypatch.setattr(os, "kill", lambda _pid, _signum: None)
    monkeypatch.setattr(child_processes, "waits_in_kernel", lambda _pid: True)
    monkeypatch.setattr(child_processes, "IN_KERNEL_S", 0.0)
    yield Child(pid, Channel(ours))
    theirs.close()
    kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    child_processes.reap_left()
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def test_a_child_that_waits_in_the_kernel_does_not_block_the_service(stuck: Child) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(stuck.lines.fd, selectors.EVENT_READ)
        end_child(stuck, selector, may_leave=True)
        assert not selector.get_map()


def test_a_child_has_no_part_in_the_connections_of_the_service() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with selectors.DefaultSelector() as selector, theirs:
        selector.register(ours.fileno(), selectors.EVENT_READ)

        def work(connection: socket.socket) -> None:
            connection.sendall(b"{}\n")
            connection.recv(1)  # until its end

        child = fork_child(work, lambda: close_inherited(selector))
        selector.register(child.lines.fd, selectors.EVENT_READ)
        assert child.lines.receive(10.0) == {}
        selector.unregister(ours.fileno())
        ours.close()
        theirs.settimeout(10.0)
        assert theirs.recv(1) == b""
        end_child(child, selector)
