"""Answers `bootseer status` on the agent's event loop, over a Unix socket in a private directory (places.py).

    in      {"do": "status"}        out     {"ok": {...}} or {"error": "...", "kind": "..."}
            {"do": "ranks"}                 the same, about all ranks (job_ranks.py); on the coordinator's node

Only this user and root may connect. A client can only break its own connection, never the job: nothing here
blocks, all sizes and times are bounded, and the client gets an error if the status cannot be made.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from bootseer.errors import BootseerError, ConfigError
from bootseer.ipc.framing import InvalidMessageError, LineBuffer, decode, encode
from bootseer.ipc.replies import from_error
from bootseer.ipc.unix_sockets import is_own_or_root, peer_of, with_short_address
from launcher.base.loop import Alarm, EventLoop
from launcher.status.places import UNFINISHED, prepare

MAX_REQUEST_BYTES = 4096
MAX_ANSWER_BYTES = 4 << 20
MAX_CLIENTS = 16
CLIENT_S = 10.0  # for a request and its answer
ACCEPT_AGAIN_S = 1.0  # after no descriptor was free

REQUESTS = ("status", "ranks")
Then = Callable[[dict[str, Any] | Exception], object]
# Gets a request, and calls back once, at once or later, with its answer or with an error.
Answer = Callable[[str, Then], object]


class StatusServer:
    """The status server of one job on this node, until `close`."""

    def __init__(
        self,
        loop: EventLoop,
        environ: Mapping[str, str],
        answer: Answer,
        on_named: Callable[[list[str]], object] = lambda _paths: None,
    ) -> None:
        """Start to listen. Args: on_named: gets the names of the socket before it exists.

        Raises: ConfigError, StorageError, OSError.
        """
        self._loop, self._answer = loop, answer
        self._clients: set[_Client] = set()
        self._again = Alarm(loop)
        directory = prepare(environ)
        name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self.path = os.path.join(directory, name)
        on_named([self.path, os.path.join(directory, UNFINISHED + name)])
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            unfinished = os.path.join(directory, UNFINISHED + name)
            with_short_address(unfinished, self._socket.bind)
            self._socket.listen(MAX_CLIENTS)
            self._socket.setblocking(False)
            os.rename(unfinished, self.path)
        except BaseException:
            self._socket.close()
            raise
        loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Close all connections, and remove the socket's name."""
        self._again.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for client in tuple(self._clients):
            client.close()
        try:
            os.unlink(self.path)
        except OSError:
            pass  # already removed

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor is free: pause, as the event loop would wake up again at once.
            self._loop.remove_reader(self._socket.fileno())
            self._again.set(ACCEPT_AGAIN_S, self._loop.add_reader, self._socket.fileno(), self._accept)
            return
        try:
            is_welcome = len(self._clients) < MAX_CLIENTS and is_own_or_root(peer_of(connection))
        except OSError:
            is_welcome = False
        if not is_welcome:
            connection.close()
            return
        connection.setblocking(False)
        self._clients.add(_Client(self._loop, connection, self._answer, self._clients.discard))


class _Client:
    """One connection: one request, one answer."""

    def __init__(
        self,
        loop: EventLoop,
        connection: socket.socket,
        answer: Answer,
        on_end: Callable[[_Client], object],
    ) -> None:
        self._loop, self._connection, self._answer, self._on_end = loop, connection, answer, on_end
        self._received = LineBuffer(MAX_REQUEST_BYTES - 1)
        self._left = memoryview(b"")
        self._is_closed = False
        self._deadline = Alarm(loop)
        self._deadline.set(CLIENT_S, self.close)
        loop.add_reader(connection.fileno(), self._read)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._deadline.cancel()
        self._loop.remove_reader(self._connection.fileno())
        self._loop.remove_writer(self._connection.fileno())
        self._connection.close()
        self._on_end(self)

    def _read(self) -> None:
        try:
            data = self._connection.recv(MAX_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        try:
            lines = self._received.feed(data)
        except InvalidMessageError:
            data, lines = b"", []
        if not data:
            self.close()
        if not lines:
            return
        self._loop.remove_reader(self._connection.fileno())
        try:
            request = decode(lines[0]).get("do")
            if request not in REQUESTS:
                raise ConfigError('a request is {"do": "status"} or {"do": "ranks"}')
            self._answer(request, self._tell)
        except InvalidMessageError:
            self._send(from_error(ConfigError("a request is a line of JSON")))
        except BootseerError as error:
            self._send(from_error(error))
        except Exception as error:  # the job must continue after any error
            self._send(from_error(error))

    def _tell(self, status: dict[str, Any] | Exception) -> None:
        self._send(from_error(status) if isinstance(status, Exception) else {"ok": status})

    def _send(self, answer: Mapping[str, Any]) -> None:
        if self._is_closed:
            return
        data = encode(answer)
        if len(data) > MAX_ANSWER_BYTES:
            data = encode(from_error(ConfigError("the status is too long")))
        self._left = memoryview(data)
        self._write()

    def _write(self) -> None:
        try:
            while self._left:
                self._left = self._left[self._connection.send(self._left) :]
        except BlockingIOError:
            self._loop.add_writer(self._connection.fileno(), self._write)
            return
        except OSError:
            pass  # the client has gone
        self.close()
