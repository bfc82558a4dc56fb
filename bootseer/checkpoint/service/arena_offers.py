"""Units that savers leave in the service's memory (`--arena-bytes`): a restart from the newest save reads nothing.

In: units of versions that are being written, from writers in ranks (saved_units.py). The service copies each into
private memory that no other process ever maps. Before it serves a unit, it verifies its checksum. Out: the files
of a version, for an arena. The oldest versions are dropped for newer ones.
"""

from __future__ import annotations

import os
import selectors
import socket
from typing import Any

from bootseer.checkpoint.format.layout import Layout
from bootseer.checkpoint.format.manifest import is_file_path, is_unit, is_version
from bootseer.checkpoint.io.arena import HeldMemory, new_memfd
from bootseer.ipc.channel import Channel
from bootseer.ipc.listener import Listener

SOCKET_NAME = "saves"
MAX_FILE_BYTES = 1 << 44
MAX_FILES = 16_384
ANSWER_LIMIT_S = 5.0


class _File:
    """One file of a version, with the units that were left here."""

    def __init__(self, unit_bytes: int) -> None:
        self.unit_bytes = unit_bytes
        self.units: dict[int, int] = {}  # number: length
        self.held = HeldMemory(new_memfd(), None)

    @property
    def bytes(self) -> int:
        return sum(self.units.values())


class _Saver:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = Channel(connection)
        self.buffer_fd = -1  # it writes a unit there before it announces it


class OfferedVersions:
    """The offered versions; runs on the service's loop."""

    def __init__(self, folder: str, selector: selectors.BaseSelector, limit_bytes: int) -> None:
        self._selector = selector
        self._limit_bytes = limit_bytes
        self._versions: dict[str, dict[str, _File]] = {}
        self.bytes = 0  # of all
        self._savers: dict[int, _Saver] = {}
        self.address = os.path.join(folder, SOCKET_NAME)
        self._listener = Listener(self.address, selector, self._take_saver)

    def find(self, version: str, path: str, layout: Layout) -> tuple[HeldMemory, list[int]] | None:
        """Return an offered file and its units; None if no unit of it fits `layout`."""
        file = self._versions.get(version, {}).get(path)
        if file is None or file.unit_bytes != layout.unit_bytes:
            return None
        units = [
            unit
            for unit, length in sorted(file.units.items())
            if unit < layout.units and length == layout.unit_length(unit)
        ]
        return (file.held, units) if units else None

    def bytes_of(self, version: str) -> int:
        """Return the bytes that were left of a version."""
        return sum(file.bytes for file in self._versions.get(version, {}).values())

    def close(self) -> None:
        for saver in list(self._savers.values()):
            self._drop(saver)
        for version in list(self._versions):
            self._forget(version)
        self._listener.close()

    # ---- savers ----------------------------------------------------------------------------------------------

    def _take_saver(self, connection: socket.socket) -> None:
        connection.settimeout(ANSWER_LIMIT_S)
        saver = _Saver(connection)
        self._selector.register(connection.fileno(), selectors.EVENT_READ, lambda: self._hear(saver))
        self._savers[connection.fileno()] = saver

    def _hear(self, saver: _Saver) -> None:
        if saver.connection.fileno() < 0:
            return  # dropped before its event was handled
        try:
            if saver.buffer_fd < 0:
                self._take_buffer(saver)
                return
            lines = saver.lines.receive_ready()
            for line in lines or ():
                taken = self._take(saver, line)
                saver.lines.send({"taken": taken})
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            lines = None
        if lines is None:
            self._drop(saver)

    def _take_buffer(self, saver: _Saver) -> None:
        data, fds, _, _ = socket.recv_fds(saver.connection, 1, 1)
        if not data or len(fds) != 1:
            for fd in fds:
                os.close(fd)
            raise ValueError("no buffer")
        saver.buffer_fd = fds[0]
        os.set_inheritable(fds[0], False)

    def _drop(self, saver: _Saver) -> None:
        self._savers.pop(saver.connection.fileno(), None)
        self._selector.unregister(saver.connection.fileno())
        saver.connection.close()
        if saver.buffer_fd >= 0:
            os.close(saver.buffer_fd)
            saver.buffer_fd = -1

    def _take(self, saver: _Saver, line: dict[str, Any]) -> bool:
        """Copy one unit; return whether it was taken. Raises ValueError for a line that no writer sends."""
        version, path = str(line["version"]), str(line["path"])
        unit_bytes, unit, length = int(line["unit_bytes"]), int(line["unit"]), int(line["length"])
        start = unit * unit_bytes
        if not (is_version(version) and is_file_path(path) and is_unit(unit_bytes)):
            raise ValueError(line)
        if unit < 0 or not 0 < length <= unit_bytes or start + length > MAX_FILE_BYTES:
            raise ValueError(line)
        known = self._versions.get(version, {}).get(path)
        if known is not None and unit in known.units:
            return True  # the writer retried; no unit is ever written twice
        if not self._make_room(version, length):
            return False
        files = self._versions.setdefault(version, {})
        file = files.get(path)
        if file is None:
            if len(files) >= MAX_FILES:
                return False
            file = files[path] = _File(unit_bytes)
        if file.unit_bytes != unit_bytes or file.held.view is not None:
            return False  # two savers of one name, or it is in use
        fd = file.held.fd
        if os.fstat(fd).st_size < start + length:
            os.ftruncate(fd, start + length)
        os.lseek(fd, start, os.SEEK_SET)
        done = 0
        while done < length:
            count = os.sendfile(fd, saver.buffer_fd, done, length - done)
            if not count:
                raise ValueError("its buffer is shorter than announced")
            done += count
        file.units[unit] = length
        self.bytes += length
        return True

    def _make_room(self, version: str, length: int) -> bool:
        while self.bytes + length > self._limit_bytes:
            oldest = min(self._versions, default=version)
            if oldest >= version:
                return False
            self._forget(oldest)
        return True

    def _forget(self, version: str) -> None:
        for file in self._versions.pop(version).values():
            os.close(file.held.fd)
            self.bytes -= file.bytes
