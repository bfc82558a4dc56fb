"""The sandbox process: a program of which the kernel reports no user gets nothing, and the next one enters."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from bootseer.mounts.sandbox import process


def test_an_unknown_program_is_turned_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, failures = str(tmp_path / "s"), [OSError(errno.ENOTCONN, "Transport endpoint is not connected")]

    def is_own(_connection: socket.socket) -> bool:
        if failures:
            raise failures.pop()
        return True

    monkeypatch.setattr(process, "is_own", is_own)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs, socket.socket(socket.AF_UNIX) as listener, open(os.devnull, "rb") as given:
        listener.bind(path)
        listener.listen(2)
        sandbox = process._Process(ours)
        sandbox._listener, sandbox._frame, sandbox._fds = listener, b"frame", [given.fileno()]
        for expected in (b"", b"frame"):
            with socket.socket(socket.AF_UNIX) as program:
                program.settimeout(20)
                program.connect(path)
                sandbox._send_descriptors()
                data, fds, _, _ = socket.recv_fds(program, 100, 1)
                assert data == expected and len(fds) == bool(expected)
                for fd in fds:
                    os.close(fd)
        sandbox._selector.close()
