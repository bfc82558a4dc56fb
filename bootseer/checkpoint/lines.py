"""JSON lines over a socket or a pair of pipes, for processes of one user that trust each other's programs."""

from __future__ import annotations

import json
import os
import socket
from typing import Any

MOST_WAITING_BYTES = 512 << 20  # of one line: manifests of many files are long
SEND_LIMIT_S = 30.0  # the other end reads nothing for so long


class LineSocket:
    """Sends and receives objects; receiving from a socket never blocks."""

    def __init__(self, connection: socket.socket | None, read_fd: int = -1, write_fd: int = -1) -> None:
        """A connection without a time limit of its own gets one."""
        self._connection = connection
        self.fd = connection.fileno() if connection is not None else read_fd
        self._write_fd = connection.fileno() if connection is not None else write_fd
        self._waiting = bytearray()
        self._is_broken = False
        if connection is not None and connection.gettimeout() is None:
            connection.settimeout(SEND_LIMIT_S)  # so that its descriptor is one that does not block, too

    @classmethod
    def of_streams(cls, read_fd: int, write_fd: int) -> LineSocket:
        return cls(None, read_fd, write_fd)

    def receive(self) -> list[dict[str, Any]] | None:
        """Whole lines that have come; None when the other end is closed, is lost, or says what is no line."""
        if self._is_broken:
            return None
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
        """Waits until it is out, within limits; what is sent to an end that is lost is lost."""
        if self._is_broken:
            return
        data = memoryview(json.dumps(record).encode() + b"\n")
        try:
            if self._connection is not None:
                self._connection.sendall(data)
                return
            while data:
                data = data[os.write(self._write_fd, data) :]
        except OSError:
            self._break()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        else:
            for fd in {self.fd, self._write_fd}:
                os.close(fd)

    def _break(self) -> None:
        """Half a line may be out: nothing that follows could be understood. Who waits for it is told."""
        self._is_broken = True
        if self._connection is not None:
            try:
                self._connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # the other end has closed it
