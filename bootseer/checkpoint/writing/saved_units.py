"""A saver's side of `--arena-bytes`: leaves written units with the checkpoint service, for the next attempt.

In: units that are being written to the store. Out: copies in the service's memory, if it has room. They never make
a save fail or wait long: after the first error no further unit is left.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from bootseer import aio
from bootseer.ipc.channel import Channel
from bootseer.ipc.unix_sockets import is_own

VARIABLE = "BOOTSEER_SAVE_ARENA"
LIMIT_S = 20.0


class SavedUnits:
    """Leaves units of one version; any thread may call it."""

    def __init__(self, address: str, version: str) -> None:
        self._address = address
        self._version = version
        self._lock = threading.Lock()
        self._lines: Channel | None = None
        self._buffer_fd = -1
        self._is_over = not address
        self._pid = os.getpid()

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], version: str) -> SavedUnits:
        """Create it from the environment; without a service, it leaves nothing."""
        return cls(environ.get(VARIABLE, ""), version)

    @asynccontextmanager
    async def leaving(self, path: str, unit_bytes: int, unit: int, data: memoryview) -> AsyncIterator[None]:
        """Leave a unit while the caller writes it; end when both are done with `data`."""
        if self._is_over or not data:
            yield
            return
        failure: BaseException | None = None
        async with asyncio.TaskGroup() as group:
            group.create_task(aio.run_io(self.leave, path, unit_bytes, unit, data))
            try:
                yield
            except BaseException as error:
                failure = error  # to raise it without its group
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # it holds this frame

    def leave(self, path: str, unit_bytes: int, unit: int, data: memoryview) -> bool:
        """Leave a unit; return whether the service has taken it. Blocks for the time of a copy or two."""
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
        lines = self._lines or self._connect()
        done = 0
        while done < len(data):
            done += os.pwrite(self._buffer_fd, data[done:], done)
        order = {
            "version": self._version, "path": path, "unit_bytes": unit_bytes, "unit": unit, "length": len(data),
        }  # fmt: skip
        lines.send(order)
        answer = lines.receive(LIMIT_S)
        if answer is None:
            raise OSError("the checkpoint service is gone")
        taken = bool(answer["taken"])
        if not taken:
            self._end()  # it is full
        return taken

    def _connect(self) -> Channel:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        lines = self._lines = Channel(connection)
        connection.settimeout(LIMIT_S)
        connection.connect(self._address)
        if not is_own(connection):
            raise OSError("the socket belongs to another user")
        self._buffer_fd = os.memfd_create("bootseer-saved-unit", os.MFD_CLOEXEC)
        socket.send_fds(connection, [b"\n"], [self._buffer_fd])
        return lines

    def _end(self) -> None:
        self._is_over = True
        if self._lines is not None:
            self._lines.close()
            self._lines = None
        if self._buffer_fd >= 0:
            os.close(self._buffer_fd)
            self._buffer_fd = -1
