"""A rank's side of the node's arena: a Source whose bytes are in memory already, or are waited for.

In: the address and digest that bootrun put into the environment. Out: `ArenaSource`, whose maps are private copies
on write: what one rank does to its tensors no other sees. When the keeper is gone, what is there stays usable, and
the rest is read from the store.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bootseer.checkpoint.arena import READY
from bootseer.checkpoint.source import Request, Source, SourceFile
from bootseer.errors import BootseerError, CheckpointError, NotFound, StorageError, Truncated

CONNECT_LIMIT_S = 30.0
WAIT_LIMIT_S = 600.0  # for one unit; the keeper's own deadlines are far below
MOST_HEADER_BYTES = 64 << 20
FDS_AT_ONCE = 200
TELL_AFTER = 64  # small spans that are kept before the keeper is told
TELL_AT_ONCE_BYTES = 1 << 20


def connect(address: str, digest: str, fallback: Callable[[], Source] | None = None) -> ArenaSource | None:
    """The arena at a keeper's address, None if it holds another version.

    Args: fallback: opens the same version from the store, once the keeper is gone.

    Raises: CheckpointError when nobody of ours answers there.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(CONNECT_LIMIT_S)
    try:
        connection.connect(address)
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            raise CheckpointError(f"the arena at {address} is another user's")
        connection.sendall(json.dumps({"do": "attach", "digest": digest}).encode() + b"\n")
        header = json.loads(_read_line(connection))
        if header["why"]:
            connection.close()
            return None
        fds = _receive_fds(connection, len(header["files"]) + 1)
    except (OSError, ValueError, KeyError, TypeError) as error:
        connection.close()
        raise CheckpointError(f"the arena at {address} does not answer: {error}") from error
    except BaseException:
        connection.close()
        raise
    return ArenaSource(connection, header, fds, fallback)


class ArenaSource:
    """See the module's docstring. Implements Source."""

    def __init__(
        self,
        connection: socket.socket,
        header: dict[str, Any],
        fds: list[int],
        fallback: Callable[[], Source] | None,
    ) -> None:
        self.url = "arena:"
        self.version = str(header["version"])
        self.digest = str(header["digest"])
        self.files: Mapping[str, SourceFile] = {path: SourceFile(path, size) for path, size, _ in header["files"]}
        self._numbers = {path: number for number, (path, _, _) in enumerate(header["files"])}
        self._unit_bytes = [int(length) for _, _, length in header["files"]]
        self._first_unit: list[int] = []
        count = 0
        for (_, size, _), length in zip(header["files"], self._unit_bytes, strict=True):
            self._first_unit.append(count)
            count += -(-size // length)
        self._states_fd, *self._fds = fds
        self._states = mmap.mmap(self._states_fd, max(1, count), flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._maps: dict[int, mmap.mmap] = {}
        self._connection: socket.socket | None = connection
        self._open_fallback = fallback
        self._fallback: Source | None = None
        self._lock = threading.Lock()
        self._questions = 0
        self._untold: list[tuple[int, int, int]] = []
        self._pid = os.getpid()
        self._counts = {"requests": 0, "read_bytes": 0, "arena_bytes": 0}

    def read(self, requests: Sequence[Request]) -> None:
        missing = []
        for request in requests:
            view = self.map(request.path, request.offset, len(request.target))
            if view is None:
                missing.append(request)
            else:
                request.target[:] = view
        if missing:
            self._get_fallback().read(missing)

    def map(self, path: str, offset: int, length: int) -> memoryview | None:
        """Raises StorageError or IntegrityError if the bytes cannot be had at all."""
        number = self._check(path, offset, length)
        if length == 0:
            return memoryview(bytearray())
        if not self._wait(number, offset, offset + length):
            return None
        with self._lock:
            self._counts["requests"] += 1
            self._counts["arena_bytes"] += length
            area = self._maps.get(number)
            if area is None:
                size = self.files[path].size
                area = mmap.mmap(self._fds[number], size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
                self._maps[number] = area
        self._note(number, offset, offset + length)
        return memoryview(area)[offset : offset + length]

    def close(self) -> None:
        with self._lock:
            if self._states_fd < 0:
                return
            self._tell()
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._maps.clear()  # an area is unmapped when its last view goes
            self._states.close()
            for fd in (self._states_fd, *self._fds):
                os.close(fd)
            self._fds, self._states_fd = [], -1
        if self._fallback is not None:
            self._fallback.close()

    def statistics(self) -> dict[str, int]:
        with self._lock:
            counts = dict(self._counts)
        if self._fallback is not None:
            counts["read_bytes"] += self._fallback.statistics()["read_bytes"]
        return counts

    # ---- waiting ---------------------------------------------------------------------------------------------

    def _check(self, path: str, offset: int, length: int) -> int:
        file = self.files.get(path)
        if file is None:
            raise NotFound(f"this node's arena: has no file {path}")
        if offset < 0 or length < 0 or offset + length > file.size:
            raise Truncated(f"{path}: bytes {offset} to {offset + length} of a file of {file.size}")
        return self._numbers[path]

    def _wait(self, number: int, start: int, end: int) -> bool:
        """Until a range is there; False if it has to come from elsewhere."""
        length, first = self._unit_bytes[number], self._first_unit[number]
        units = range(start // length, -(-end // length))
        missing = [unit for unit in units if self._states[first + unit] != READY]
        if not missing:
            return True
        with self._lock:
            if self._connection is None or self._pid != os.getpid():
                return False  # a forked child: the connection is its parent's
            self._questions += 1
            try:
                self._send({"do": "want", "id": self._questions, "units": [[number, unit] for unit in missing]})
                self._connection.settimeout(WAIT_LIMIT_S)
                answer = json.loads(_read_line(self._connection))
            except (OSError, ValueError):
                self._connection.close()
                self._connection = None
                return False  # the keeper is gone
        if answer["why"]:
            if self._open_fallback is not None:
                return False  # the store itself says what is wrong
            raise StorageError(str(answer["why"]))
        return True

    def _note(self, number: int, start: int, end: int) -> None:
        """For the next load's prefetch."""
        with self._lock:
            self._untold.append((number, start, end))
            if end - start >= TELL_AT_ONCE_BYTES or len(self._untold) >= TELL_AFTER:
                self._tell()

    def _tell(self) -> None:
        untold, self._untold = self._untold, []
        if untold and self._connection is not None and self._pid == os.getpid():
            try:
                self._send({"do": "asked", "spans": untold})
            except OSError:
                pass  # the keeper is gone: nobody keeps it

    def _send(self, record: dict[str, Any]) -> None:
        assert self._connection is not None
        self._connection.sendall(json.dumps(record).encode() + b"\n")

    def _get_fallback(self) -> Source:
        with self._lock:
            if self._fallback is None:
                if self._open_fallback is None:
                    raise StorageError("this node's arena is gone, and with it what was not loaded yet")
                try:
                    self._fallback = self._open_fallback()
                except BootseerError as error:
                    raise StorageError(
                        f"this node's arena is gone, and the store does not help: {error}"
                    ) from error
            return self._fallback


def _read_line(connection: socket.socket) -> bytes:
    """Up to a line feed, byte for byte what belongs to the line: descriptors may follow."""
    parts = bytearray()
    while not parts.endswith(b"\n"):
        chunk = connection.recv(1 << 16, socket.MSG_PEEK)
        if not chunk or len(parts) > MOST_HEADER_BYTES:
            raise OSError("the connection was closed")
        end = chunk.find(b"\n")
        parts += connection.recv(len(chunk) if end < 0 else end + 1)
    return bytes(parts)


def _receive_fds(connection: socket.socket, count: int) -> list[int]:
    fds: list[int] = []
    try:
        while len(fds) < count:
            data, more, _, _ = socket.recv_fds(connection, 1, FDS_AT_ONCE)
            fds += more
            if not data:
                raise OSError("the connection was closed")
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    for fd in fds:
        os.set_inheritable(fd, False)
    return fds
