"""The server of ipc/client.py in a tree's daemon, on its event loop: the socket, and the leases on the tree.

Only requests of this user and root are answered. A faulty client (half a line, a long one, none) loses only its
own connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from bootseer.errors import ConfigError
from bootseer.ipc.framing import InvalidMessageError, LineBuffer, decode, encode
from bootseer.ipc.replies import from_error
from bootseer.ipc.unix_sockets import is_own_or_root, peer_of, with_short_address
from bootseer.logs import get_logger

_log = get_logger(__name__)

MAX_REQUEST_BYTES = 64 << 10
MAX_CONNECTIONS = 4096
REQUEST_S = 30.0  # a connection without lease or request is closed after it
SEND_S = 10.0


class Lease:
    """A connection while it holds the tree."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.peer = peer_of(connection)
        self.since_s = time.monotonic()
        self.awaits_answer = False  # a request awaits its answer


Answer = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


class Listener:
    """The socket in a directory, and the leases on the tree that is mounted there."""

    def __init__(
        self,
        path: str,
        answer: Answer,
        *,
        on_change: Callable[[], object] = lambda: None,
    ) -> None:
        """Listen from now on; `accept` answers.

        Args:
            answer: is called for each request; after one for `hold` the connection is a lease.
            on_change: is called when a lease begins or ends.
        Raises: OSError.
        """
        self.leases: set[Lease] = set()
        self._answer, self._on_change = answer, on_change
        self._count = 0
        self._answering = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with suppress(FileNotFoundError):
                os.unlink(path)  # of one that was killed
            with_short_address(path, self._socket.bind)
            os.chmod(path, 0o600)
            self._socket.listen(1024)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    async def accept(self, group: asyncio.TaskGroup) -> None:
        """Accept connections until it is cancelled; each is a task of `group`."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(0.1)  # no descriptor is free
                continue
            if self._count >= MAX_CONNECTIONS or not _is_welcome(connection):
                connection.close()
                continue
            connection.setblocking(False)
            self._count += 1
            group.create_task(self._serve_connection(connection)).add_done_callback(self._count_off)

    def drop_leases(self) -> None:
        """Close leases, which notifies their holders that the tree has ended."""
        for lease in self.leases:
            if not lease.awaits_answer:
                with suppress(OSError):
                    lease.connection.shutdown(socket.SHUT_RDWR)

    async def finish(self, timeout_s: float) -> None:
        """Accept no more connections; requests in progress get their answers."""
        self._socket.close()
        end_s = time.monotonic() + timeout_s
        while self._answering and time.monotonic() < end_s:
            await asyncio.sleep(0.005)

    def _count_off(self, _task: asyncio.Task[None]) -> None:
        self._count -= 1

    async def _serve_connection(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        lease: Lease | None = None
        received = LineBuffer(MAX_REQUEST_BYTES)
        lines: list[bytes] = []
        try:
            while True:
                if not lines:
                    async with asyncio.timeout(None if lease else REQUEST_S):
                        data = await loop.sock_recv(connection, 65536)
                    if not data:
                        return
                    lines = received.feed(data)
                    continue
                line = lines.pop(0)
                self._answering += 1
                if lease is not None:
                    lease.awaits_answer = True
                try:
                    answer, lease = await self._serve(line, connection, lease)
                    async with asyncio.timeout(SEND_S):
                        await loop.sock_sendall(connection, encode(answer))
                finally:
                    self._answering -= 1
                    if lease is not None:
                        lease.awaits_answer = False
        except (OSError, TimeoutError, InvalidMessageError):
            pass  # it has ended, or sends no request
        except Exception as error:  # on any error other connections continue
            _log.info("a request could not be answered: %r", error)
        finally:
            connection.close()
            if lease is not None:
                self.leases.discard(lease)
                self._on_change()

    async def _serve(
        self, line: bytes, connection: socket.socket, lease: Lease | None
    ) -> tuple[dict[str, Any], Lease | None]:
        try:
            request = decode(line)
            if not isinstance(request.get("do"), str):
                raise ConfigError('a request is {"do": "..."}')
            answer = await self._answer(request)
        except InvalidMessageError:
            return from_error(ConfigError("a request is a line of JSON")), lease
        except Exception as error:
            return from_error(error), lease
        if request["do"] == "hold" and lease is None:
            lease = Lease(connection)
            self.leases.add(lease)
            self._on_change()
        return {"ok": answer}, lease


def _is_welcome(connection: socket.socket) -> bool:
    """Return whether the client is this user's or root's; False if the kernel does not report it."""
    try:
        return is_own_or_root(peer_of(connection))
    except OSError:
        return False
