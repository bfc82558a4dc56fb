"""A saver's side of `--arena-bytes`: leaves what it writes with this node's keeper, for the next attempt.

In: units on their way to the store. Out: copies in the keeper's memory, if it has room. A save never fails or
waits long because of it: at the first trouble nothing more is left.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from bootseer import aio
from bootseer.checkpoint.peers import is_own

VARIABLE = "BOOTSEER_SAVE_ARENA"
LIMIT_S = 20.0


class SavedUnits:
    """For one version; calls may come from any thread."""

    def __init__(self, address: str, version: str) -> None:
        self._address = address
        self._version = version
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._buffer_fd = -1
        self._is_over = not address
        self._pid = os.getpid()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], version: str) -> SavedUnits:
        """Leaves nothing where no keeper wants it."""
        return cls(environ.get(VARIABLE, ""), version)

    @asynccontextmanager
    async def leaving(self, path: str, unit_bytes: int, unit: int, data: memoryview) -> AsyncIterator[None]:
        """Leaves a unit while the caller writes it; ends when both are done with `data`."""
        if self._is_over or not data:
            yield
            return
        failure: BaseException | None = None
        async with asyncio.TaskGroup() as group:
            group.create_task(aio.run_io(self.leave, path, unit_bytes, unit, data))
            try:
                yield
            except BaseException as error:
                failure = error  # not as one of a group
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it holds this frame

    def leave(self, path: str, unit_bytes: int, unit: int, data: memoryview) -> bool:
        """Whether the keeper has taken it. Blocks for the time of a copy or two."""
        if self._is_over or not data:
            return False
        with self._lock:
            try:
                return self._leave(path, unit_bytes, unit, data)
            except (OSError, ValueError, KeyError, TypeError):
                self._end()
                return False

    def close(self) -> None:
        with self._lock:
            self._end()

    __del__ = close

    def _leave(self, path: str, unit_bytes: int, unit: int, data: memoryview) -> bool:
        if self._is_over or self._pid != os.getpid():
            return False  # a forked child: the connection is its parent's
        connection = self._connection or self._connect()
        done = 0
        while done < len(data):
            done += os.pwrite(self._buffer_fd, data[done:], done)
        order = {
            "version": self._version, "path": path, "unit_bytes": unit_bytes, "unit": unit, "length": len(data),
        }  # fmt: skip
        connection.sendall(json.dumps(order).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            chunk = connection.recv(4096)
            if not chunk:
                raise OSError("the keeper is gone")
            answer += chunk
        taken = bool(json.loads(answer)["taken"])
        if not taken:
            self._end()  # it has no more room
        return taken

    def _connect(self) -> socket.socket:
        connection = self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(LIMIT_S)
        connection.connect(self._address)
        if not is_own(connection):
            raise OSError("it is another user's")
        self._buffer_fd = os.memfd_create("bootseer-saved-unit", os.MFD_CLOEXEC)
        socket.send_fds(connection, [b"\n"], [self._buffer_fd])
        return connection

    def _end(self) -> None:
        self._is_over = True
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._buffer_fd >= 0:
            os.close(self._buffer_fd)
            self._buffer_fd = -1
