"""Answers `bootseer status` on the agent's event loop, over a Unix socket in a private folder (places.py).

    in      {"do": "status"}        out     {"ok": {...}} or {"error": "...", "kind": "..."}

Only this user and root are listened to. Whatever a client does costs only its own connection, never the job:
nothing here blocks, all is bounded, and an answer that cannot be made is an error for who asked.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

from bootseer.errors import BootseerError, ConfigError
from bootseer.mounts.tree_control import from_error, may_talk, peer_of
from launcher.loop import Alarm, EventLoop
from launcher.status.places import UNFINISHED, prepare

MOST_REQUEST_BYTES = 4096
MOST_ANSWER_BYTES = 4 << 20
MOST_CLIENTS = 16
CLIENT_S = 10.0  # for a request and its answer
ACCEPT_AGAIN_S = 1.0  # after no descriptor was free

# Calls back with the status, or with why there is none, at once or later, once.
Answer = Callable[[Callable[[dict[str, Any] | Exception], object]], object]


class StatusServer:
    """Of one job on this node, until `close`."""

    def __init__(
        self,
        loop: EventLoop,
        environ: Mapping[str, str],
        answer: Answer,
        on_named: Callable[[list[str]], object] = lambda _paths: None,
    ) -> None:
        """Listens from here on. Args: on_named: is told the names that it will have, before it has them.

        Raises: ConfigError, StorageError, OSError.
        """
        self._loop, self._answer = loop, answer
        self._clients: set[_Client] = set()
        self._again = Alarm(loop)
        folder = prepare(environ)
        name = f"{os.getpid()}-{os.urandom(4).hex()}"
        self.path = os.path.join(folder, name)
        on_named([self.path, os.path.join(folder, UNFINISHED + name)])
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                # By the folder's descriptor: addresses of sockets have at most 107 bytes.
                self._socket.bind(f"/proc/self/fd/{fd}/{UNFINISHED}{name}")
                self._socket.listen(MOST_CLIENTS)
                self._socket.setblocking(False)
                os.rename(UNFINISHED + name, name, src_dir_fd=fd, dst_dir_fd=fd)
            finally:
                os.close(fd)
        except BaseException:
            self._socket.close()
            raise
        loop.add_reader(self._socket.fileno(), self._accept)

    def close(self) -> None:
        """Nobody is answered any more; the socket's name goes."""
        self._again.cancel()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        for client in tuple(self._clients):
            client.close()
        try:
            os.unlink(self.path)
        except OSError:
            pass  # somebody has cleaned up

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return
        except OSError:
            # No descriptor is free: the loop must not be woken for it again and again.
            self._loop.remove_reader(self._socket.fileno())
            self._again.set(ACCEPT_AGAIN_S, self._loop.add_reader, self._socket.fileno(), self._accept)
            return
        try:
            is_welcome = len(self._clients) < MOST_CLIENTS and may_talk(peer_of(connection))
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
        self._received = b""
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
            data = self._connection.recv(MOST_REQUEST_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        line, found, _ = self._received.partition(b"\n")
        if not data or (not found and len(self._received) >= MOST_REQUEST_BYTES):
            self.close()
            return
        if not found:
            return
        self._loop.remove_reader(self._connection.fileno())
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or request.get("do") != "status":
                raise ConfigError('a request is {"do": "status"}')
            self._answer(self._tell)
        except (ValueError, RecursionError):
            self._send(from_error(ConfigError("a request is a line of JSON")))
        except BootseerError as error:
            self._send(from_error(error))
        except Exception as error:  # whatever it is, the job goes on
            self._send(from_error(error))

    def _tell(self, status: dict[str, Any] | Exception) -> None:
        self._send(from_error(status) if isinstance(status, Exception) else {"ok": status})

    def _send(self, answer: Mapping[str, Any]) -> None:
        if self._is_closed:
            return
        data = json.dumps(answer).encode() + b"\n"
        if len(data) > MOST_ANSWER_BYTES:
            data = json.dumps(from_error(ConfigError("the status is too long"))).encode() + b"\n"
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
            pass  # it has gone
        self.close()
