"""JSON lines over a socket to a helper process: orders out, answers in. Nothing here blocks.

    {"do": "start", ...}   ->   {"did": "ready", ...}

What comes is a map, or the connection ends; what a map means is for its reader to check. What is asked before the
other end has come is sent when it does.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from bootseer.light_typing import Any
from launcher.loop import EventLoop

MOST_LINE_BYTES = 64 << 20  # an answer; they are small
READ_BYTES = 1 << 18
NOT_UNDERSTOOD = "it said what could not be understood"


class JsonLines:
    """One connection. `on_end` gets the reason, once and not after `close`, when the other end is gone or talks
    nonsense; then it is closed.
    """

    def __init__(
        self, loop: EventLoop, on_answer: Callable[[dict[str, Any]], object], on_end: Callable[[str], object]
    ) -> None:
        self._loop = loop
        self._on_answer = on_answer
        self._on_end = on_end
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self._connection: socket.socket | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def open(self, connection: socket.socket) -> None:
        """Talks over it from now on; it is closed by `close`."""
        connection.setblocking(False)
        self._connection = connection
        self._loop.add_reader(connection.fileno(), self._read)
        self._write()

    def ask(self, do: str, **fields: object) -> None:
        """Sends an order."""
        import json

        if not self._is_closed:
            self._outgoing += json.dumps({"do": do, **fields}).encode("ascii") + b"\n"
            self._write()

    def close(self) -> None:
        """For good; what was not sent is lost."""
        self._is_closed = True
        self._outgoing.clear()
        connection, self._connection = self._connection, None
        if connection is not None:
            self._loop.remove_reader(connection.fileno())
            self._loop.remove_writer(connection.fileno())
            connection.close()

    def _read(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._incoming += data
        if not data or len(self._incoming) > MOST_LINE_BYTES:
            self._end(NOT_UNDERSTOOD if data else "it closed its connection")
            return
        *lines, rest = self._incoming.split(b"\n")
        self._incoming = bytearray(rest)
        for line in lines:
            if self._is_closed:
                return  # by what an answer led to
            self._take(bytes(line))

    def _take(self, line: bytes) -> None:
        """What follows from it is outside the `try`: its errors are not the other end's."""
        import json

        try:
            answer = json.loads(line)
            if not isinstance(answer, dict):
                raise ValueError(answer)
        except (ValueError, RecursionError):
            self._end(NOT_UNDERSTOOD)
            return
        self._on_answer(answer)

    def _write(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            while self._outgoing:
                del self._outgoing[: connection.send(self._outgoing)]
        except BlockingIOError:
            self._loop.add_writer(connection.fileno(), self._write)
            return
        except OSError:
            self._outgoing.clear()  # `_read` sees the end as well
        self._loop.remove_writer(connection.fileno())

    def _end(self, why: str) -> None:
        self.close()
        self._on_end(why)
