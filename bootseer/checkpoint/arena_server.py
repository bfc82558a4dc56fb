"""The keeper's side of the socket at which ranks find the arena.

Only processes of the same user get in; they get descriptors that cannot be written through. A rank says which
units it waits for, and is answered when they are there; it says what it has read, for the next load's prefetch.
What it says is bounded, and wrong things only end its own connection.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import tempfile
from collections.abc import Callable
from typing import Any

from bootseer.checkpoint.arena import READY, Arena
from bootseer.checkpoint.lines import LineSocket
from bootseer.checkpoint.spans import Spans
from bootseer.checkpoint.versions import Pinned

FDS_AT_ONCE = 200  # the kernel takes 253
SEND_LIMIT_S = 10.0
SOCKET_NAME = "socket"
Unit = tuple[int, int]  # number of the file, number of the unit in it


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = LineSocket(connection)
        self.is_attached = False
        self.waits: dict[int, set[Unit]] = {}  # by the rank's number of the question


class ArenaServer:
    """See the module's docstring. Runs on the keeper's loop."""

    def __init__(self, folder: str, selector: selectors.BaseSelector, want: Callable[[list[Unit]], None]) -> None:
        self._folder = folder
        self._selector = selector
        self._want = want
        self._clients: dict[int, _Client] = {}
        self._arena: Arena | None = None
        self._pinned: Pinned | None = None
        self.asked: dict[str, Spans] = {}  # what ranks have read
        self.is_used = False
        self.address = os.path.join(folder, SOCKET_NAME)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(self.address)
        self._listener.listen(256)
        selector.register(self._listener.fileno(), selectors.EVENT_READ, self._accept)

    def serve(self, arena: Arena, pinned: Pinned) -> None:
        """From now on this is what ranks get; those of another version are sent away."""
        for client in list(self._clients.values()):
            self._drop(client)
        self._arena, self._pinned = arena, pinned
        self.asked = {}
        self.is_used = False

    def note_unit(self, unit: Unit, why: str) -> None:
        """A unit has come, or cannot be had."""
        for client in list(self._clients.values()):
            for question, units in list(client.waits.items()):
                if unit not in units:
                    continue
                units.discard(unit)
                if why or not units:
                    del client.waits[question]
                    client.lines.send({"id": question, "why": why})

    def wanted(self) -> list[Unit]:
        """All that ranks wait for."""
        return sorted(
            {unit for client in self._clients.values() for units in client.waits.values() for unit in units}
        )

    def make_links(self, single: bool) -> str:
        """A folder with a link for each file, for code that opens them by name; with `single` the only link."""
        assert self._arena is not None
        folder = tempfile.mkdtemp(prefix="files-", dir=self._folder)
        for file, fd in zip(self._arena.files, self._arena.fds, strict=True):
            path = os.path.join(folder, file.path)
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            os.symlink(f"/proc/{os.getpid()}/fd/{fd}", path)
        return os.path.join(folder, self._arena.files[0].path) if single else folder

    def close(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._selector.unregister(self._listener.fileno())
        self._listener.close()
        os.unlink(self.address)

    def close_inherited(self) -> None:
        """In a forked child: these connections are the keeper's."""
        self._listener.close()
        for client in self._clients.values():
            client.connection.close()

    # ---- clients ---------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.geteuid():
            connection.close()
            return
        connection.settimeout(SEND_LIMIT_S)
        client = _Client(connection)
        self._clients[connection.fileno()] = client
        self._selector.register(connection.fileno(), selectors.EVENT_READ, lambda: self._hear(client))

    def _hear(self, client: _Client) -> None:
        lines = client.lines.receive()
        try:
            for line in lines or ():
                self._take(client, line)
        except (KeyError, TypeError, ValueError, IndexError, OSError):
            lines = None
        if lines is None:
            self._drop(client)

    def _drop(self, client: _Client) -> None:
        fd = client.connection.fileno()
        if self._clients.pop(fd, None) is not None:
            self._selector.unregister(fd)
            client.connection.close()

    def _take(self, client: _Client, line: dict[str, Any]) -> None:
        arena, pinned = self._arena, self._pinned
        assert arena is not None and pinned is not None
        match line["do"]:
            case "attach":
                self._attach(client, arena, pinned, str(line["digest"]))
            case "want":
                units = {self._check(arena, int(file), int(unit)) for file, unit in line["units"]}
                missing = {each for each in units if arena.state(*each) != READY}
                if missing:
                    client.waits[int(line["id"])] = missing
                    self._want(sorted(missing))
                else:
                    client.lines.send({"id": int(line["id"]), "why": ""})
            case "asked":
                for file, start, end in line["spans"]:
                    found = arena.files[self._check_file(arena, int(file))]
                    if not 0 <= int(start) < int(end) <= found.size:
                        raise ValueError(line)
                    self.asked.setdefault(found.path, Spans()).add(int(start), int(end))

    def _attach(self, client: _Client, arena: Arena, pinned: Pinned, digest: str) -> None:
        if digest != pinned.digest:
            client.lines.send({"why": f"the arena holds version {pinned.version or pinned.digest[:12]}"})
            return
        client.is_attached = self.is_used = True
        files = [
            [file.path, file.size, length] for file, length in zip(arena.files, arena.unit_bytes, strict=True)
        ]
        client.lines.send({"why": "", "version": pinned.version, "digest": digest, "files": files})
        fds = [arena.states_fd, *arena.fds]
        for start in range(0, len(fds), FDS_AT_ONCE):
            socket.send_fds(client.connection, [b"\n"], fds[start : start + FDS_AT_ONCE])

    def _check_file(self, arena: Arena, file: int) -> int:
        if not 0 <= file < len(arena.files):
            raise ValueError(file)
        return file

    def _check(self, arena: Arena, file: int, unit: int) -> Unit:
        if unit not in arena.units_of(self._check_file(arena, file)):
            raise ValueError(unit)
        return file, unit
