"""JSON lines over a socket to a helper process: orders out, answers in. Nothing here blocks.

    {"do": "start", ...}   ->   {"did": "ready", ...}

Each line must be a JSON object that the reader's `check` accepts, else the connection ends. Orders are queued
until the other end has connected.
"""

from __future__ import annotations

from bootseer.ipc.framing import InvalidMessageError, LineBuffer, decode, encode
from bootseer.light_stdlib import socket
from bootseer.light_typing import Any, Callable
from launcher.base.loop import EventLoop

MAX_LINE_BYTES = 64 << 20  # of an answer; answers are small
READ_BYTES = 1 << 18
NOT_UNDERSTOOD = "it sent an invalid message"


class JsonLines:
    """One connection. `on_end` gets the reason if the other end is gone or sends invalid data; the connection is
    closed then. It is called once, and not after `close`.
    """

    def __init__(
        self,
        loop: EventLoop,
        on_answer: Callable[[dict[str, Any]], object],
        on_end: Callable[[str], object],
        check: Callable[[dict[str, Any]], object] = lambda _: None,
    ) -> None:
        """Args: check: raises InvalidMessageError for an answer with missing or wrong fields."""
        self._loop = loop
        self._on_answer = on_answer
        self._on_end = on_end
        self._check = check
        self._incoming = LineBuffer(MAX_LINE_BYTES)
        self._outgoing = bytearray()
        self._connection: socket.socket | None = None
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        return self._connection is not None

    def open(self, connection: socket.socket) -> None:
        """Use this connection from now on; `close` closes it."""
        connection.setblocking(False)
        self._connection = connection
        self._loop.add_reader(connection.fileno(), self._read)
        self._write()

    def ask(self, do: str, **fields: object) -> None:
        """Send an order."""
        if not self._is_closed:
            self._outgoing += encode({"do": do, **fields})
            self._write()

    def close(self) -> None:
        """Close the connection; unsent orders are lost."""
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
        if not data:
            self._end("it closed its connection")
            return
        try:
            lines = self._incoming.feed(data)
        except InvalidMessageError:
            self._end(NOT_UNDERSTOOD)
            return
        for line in lines:
            if self._is_closed:
                return  # an answer has closed it
            self._take(line)

    def _take(self, line: bytes) -> None:
        """Pass an answer on. The errors of its handler are outside the `try`: they are not the other end's."""
        try:
            answer = decode(line)
            self._check(answer)
        except InvalidMessageError:
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
            self._outgoing.clear()  # `_read` sees the end too
        self._loop.remove_writer(connection.fileno())

    def _end(self, why: str) -> None:
        self.close()
        self._on_end(why)
