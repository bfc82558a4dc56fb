"""The daemon's end of tree_control.py, on its event loop: the socket, and the leases of those who hold the tree.

Only this user and root are listened to. Whatever a client does (half a line, a long one, nothing) costs only its
own connection.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from bootseer.errors import ConfigError
from bootseer.mounts.tree_control import from_error, may_talk, peer_of

MOST_REQUEST_BYTES = 64 << 10
MOST_CONNECTIONS = 4096
REQUEST_S = 30.0  # a connection that holds nothing and asks nothing is closed after it
SEND_S = 10.0


class Lease:
    """A connection while it holds the tree."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.peer = peer_of(connection)
        self.since_s = time.monotonic()
        self.is_asking = False  # for an answer that it is to get


Answer = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]


class Listener:
    """The socket in a folder, and the leases of those who hold what the folder shows."""

    def __init__(
        self,
        path: str,
        answer: Answer,
        *,
        on_change: Callable[[], object] = lambda: None,
        log: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Listens from here on; `accept` answers.

        Args:
            answer: is called for each request; after one for `hold` the connection is a lease.
            on_change: is called when a lease begins or ends.
        Raises: OSError.
        """
        self.leases: set[Lease] = set()
        self._answer, self._on_change, self._log = answer, on_change, log
        self._count = 0
        self._answering = 0
        folder, name = os.path.split(path)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            fd = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)  # of one that was killed
                self._socket.bind(f"/proc/self/fd/{fd}/{name}")
                os.chmod(f"/proc/self/fd/{fd}/{name}", 0o600)
            finally:
                os.close(fd)
            self._socket.listen(1024)
            self._socket.setblocking(False)
        except BaseException:
            self._socket.close()
            raise

    async def accept(self, group: asyncio.TaskGroup) -> None:
        """Until it is cancelled; each connection is a task of `group`."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(0.1)  # no descriptor is free
                continue
            if self._count >= MOST_CONNECTIONS or not may_talk(peer_of(connection)):
                connection.close()
                continue
            connection.setblocking(False)
            self._count += 1
            group.create_task(self._talk(connection)).add_done_callback(self._count_off)

    def drop_leases(self) -> None:
        """Their holders are to learn that the tree has ended."""
        for lease in self.leases:
            if not lease.is_asking:
                with suppress(OSError):
                    lease.connection.shutdown(socket.SHUT_RDWR)

    async def finish(self, timeout_s: float) -> None:
        """Takes no more connections; requests that are being answered get their answers."""
        self._socket.close()
        end_s = time.monotonic() + timeout_s
        while self._answering and time.monotonic() < end_s:
            await asyncio.sleep(0.005)

    def _count_off(self, _task: asyncio.Task[None]) -> None:
        self._count -= 1

    async def _talk(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        lease: Lease | None = None
        received = b""
        try:
            while True:
                line, found, received = received.partition(b"\n")
                if not found:
                    received = line
                    async with asyncio.timeout(None if lease else REQUEST_S):
                        data = await loop.sock_recv(connection, 65536)
                    received += data
                    if not data or len(received) > MOST_REQUEST_BYTES:
                        return
                    continue
                self._answering += 1
                if lease is not None:
                    lease.is_asking = True
                try:
                    answer, lease = await self._serve(line, connection, lease)
                    async with asyncio.timeout(SEND_S):
                        await loop.sock_sendall(connection, json.dumps(answer).encode() + b"\n")
                finally:
                    self._answering -= 1
                    if lease is not None:
                        lease.is_asking = False
        except (OSError, TimeoutError):
            pass  # it has gone, or asks nothing
        except Exception as error:  # whatever it is, others go on
            self._log(f"a request could not be answered: {error!r}")
        finally:
            connection.close()
            if lease is not None:
                self.leases.discard(lease)
                self._on_change()

    async def _serve(
        self, line: bytes, connection: socket.socket, lease: Lease | None
    ) -> tuple[dict[str, Any], Lease | None]:
        try:
            request = json.loads(line)
            if not isinstance(request, dict) or not isinstance(request.get("do"), str):
                raise ConfigError('a request is {"do": "..."}')
            answer = await self._answer(request)
        except (ValueError, RecursionError):
            return from_error(ConfigError("a request is a line of JSON")), lease
        except Exception as error:
            return from_error(error), lease
        if request["do"] == "hold" and lease is None:
            lease = Lease(connection)
            self.leases.add(lease)
            self._on_change()
        return {"ok": answer}, lease
