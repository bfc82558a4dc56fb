"""Listening for processes of one user: too few descriptors cost a connection, not the listener."""

from __future__ import annotations

import errno
import os
import resource
import selectors
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bootseer.ipc import listener as module
from bootseer.ipc.listener import Listener
from bootseer.ipc.unix_sockets import is_own


@contextmanager
def no_descriptors() -> Iterator[None]:
    """None is left for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def address(tmp_path: Path) -> str:
    return str(tmp_path / "s")


def connect(address: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(20)
    connection.connect(address)
    return connection


def test_it_takes_connections_of_this_user(address: str) -> None:
    taken: list[socket.socket] = []
    with selectors.DefaultSelector() as selector:
        listener = Listener(address, selector, taken.append)
        with connect(address) as client:
            assert is_own(client)
            [(key, _)] = selector.select(20)
            key.data()
            listener.accept()  # nobody waits any more
            assert len(taken) == 1
            taken[0].close()
        listener.close()
        assert not selector.get_map() and not os.path.exists(address)


def test_without_descriptors_who_waits_is_turned_away(address: str) -> None:
    taken: list[socket.socket] = []
    with selectors.DefaultSelector() as selector:
        listener = Listener(address, selector, taken.append)
        with connect(address) as client, connect(address) as second:
            with no_descriptors():
                listener.accept()
            assert client.recv(1) == b"" and not taken
            listener.accept()
            assert len(taken) == 1
            assert selector.select(0) == []  # it is not woken for what it cannot take
            taken[0].sendall(b"x")
            assert second.recv(1) == b"x"
            taken[0].close()
        os.unlink(address)
        listener.close()  # somebody has cleaned up


def test_without_descriptors_on_the_node_it_goes_on(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process takes the descriptor that the spare one has freed."""

    def open_none() -> int:
        raise OSError(errno.ENFILE, "Too many open files in system")

    taken: list[socket.socket] = []
    with selectors.DefaultSelector() as selector:
        listener = Listener(address, selector, taken.append)
        with connect(address) as first, connect(address):
            with monkeypatch.context() as patch, no_descriptors():
                patch.setattr(module, "_open_spare", open_none)
                listener.accept()
                assert first.recv(1) == b""
                other = os.dup(0)  # it gets the number that the spare one had
                listener.accept()
                assert not taken
            listener.accept()
            assert len(taken) == 1
            taken[0].close()
        listener.close()
        os.close(other)  # it was not closed in place of the spare one


def test_a_connection_that_cannot_be_watched_is_closed(address: str) -> None:
    def refuse(_connection: socket.socket) -> None:
        raise OSError("no memory")

    with selectors.DefaultSelector() as selector:
        listener = Listener(address, selector, refuse)
        with connect(address) as client:
            listener.accept()
            assert client.recv(1) == b""
        listener.close()


def test_the_service_may_have_many_descriptors() -> None:
    script = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
        "from bootseer.checkpoint.service.process import allow_descriptors\n"
        "allow_descriptors(); print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "(512, 512)\n"
