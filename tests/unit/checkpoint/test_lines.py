"""Lines between the keeper's processes: no end waits for ever for the other, none goes on after half a line."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest

from bootseer.checkpoint.lines import LineSocket

Ends = tuple[LineSocket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    theirs.settimeout(20)
    yield LineSocket(ours), theirs
    ours.close()
    theirs.close()


def test_lines_come_whole_and_in_order(ends: Ends) -> None:
    lines, other = ends
    other.sendall(b'{"a": 1}\n{"b"')
    assert lines.receive() == [{"a": 1}]
    other.sendall(b": 2}\n")
    assert lines.receive() == [{"b": 2}]
    lines.send({"c": 3})
    assert json.loads(other.recv(100)) == {"c": 3}
    other.close()
    assert lines.receive() is None


@pytest.mark.timeout(20)
def test_receiving_does_not_wait(ends: Ends) -> None:
    # Of an event that another socket with the same descriptor had: nothing has come here.
    assert ends[0].receive() == []


@pytest.mark.parametrize("line", [b"nothing\n", b"[]\n", b"\xff\n"])
def test_what_is_no_line_ends_it(line: bytes, ends: Ends) -> None:
    ends[1].sendall(line)
    assert ends[0].receive() is None


@pytest.mark.timeout(20)
def test_who_does_not_read_is_left() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        ours.settimeout(0.05)
        lines = LineSocket(ours)
        lines.send({"long": "x" * (8 << 20)})
        ours.settimeout(1000)
        lines.send({"next": 1})  # at once: half a line is out
        assert lines.receive() is None
        data = bytearray()
        while chunk := theirs.recv(1 << 20):
            data += chunk
        assert data and b"next" not in data


def test_streams() -> None:
    there, here = os.pipe(), os.pipe()
    lines = LineSocket.of_streams(there[0], here[1])
    os.write(there[1], b"{}\n")
    assert lines.receive() == [{}]
    lines.send({"x": 1})
    assert os.read(here[0], 100) == b'{"x": 1}\n'
    lines.close()
    os.close(there[1])
    os.close(here[0])
