"""JSON lines over a socket or a pair of pipes, for processes of one user that trust each other's programs."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

MOST_WAITING_BYTES = 512 << 20  # of one line: manifests of many files are long


class LineSocket:
    """Sends and receives objects; receiving never blocks when the descriptor is readable."""

    def __init__(self, connection: socket.socket | None, read_fd: int = -1, write_fd: int = -1) -> None:
        self._connection = connection
        self.fd = connection.fileno() if connection is not None else read_fd
        self._write_fd = connection.fileno() if connection is not None else write_fd
        self._waiting = bytearray()

    @classmethod
    def of_streams(cls, read_fd: int, write_fd: int) -> LineSocket:
        return cls(None, read_fd, write_fd)

    def receive(self) -> list[dict[str, Any]] | None:
        """Whole lines that have come; None when the other end is closed or says what is no line."""
        try:
            data = os.read(self.fd, 1 << 20)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data or len(self._waiting) > MOST_WAITING_BYTES:
            return None
        self._waiting += data
        *lines, rest = self._waiting.split(b"\n")
        self._waiting = bytearray(rest)
        try:
            found = [json.loads(line) for line in lines]
        except ValueError:
            return None
        return found if all(isinstance(each, dict) for each in found) else None

    def send(self, record: dict[str, Any]) -> None:
        """Waits until it is out; what is sent to an end that is closed is lost."""
        data = memoryview(json.dumps(record).encode() + b"\n")
        try:
            if self._connection is not None:
                self._connection.sendall(data)  # as long as its own time limit allows
                return
            while data:
                data = data[os.write(self._write_fd, data) :]
        except OSError:
            pass  # `receive` tells

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        else:
            for fd in {self.fd, self._write_fd}:
                os.close(fd)
