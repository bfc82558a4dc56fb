"""The service's side of the socket at which ranks find the arena.

Only processes of the same user are admitted; they get descriptors that cannot be written through. A rank requests
units, and gets an answer when they are ready or have failed. It reports the spans that it has read, for the next
load's prefetch, and reports when it has its part. Its messages are bounded; an invalid one ends only its own
connection.
    attach   digest rank      -> why version digest files, with the descriptor of the units' states
    file     file             -> why, with the descriptor of a file
    want     id units         -> id failed why, when all units (file, first, end) are ready or have failed;
                                 until then a keepalive every few seconds, id 0
    asked    spans            spans that were read: (file, start, end)
    done                      the rank has its part
    taken                     another service has taken over all of it (warm_arenas.py)
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from bootseer.checkpoint.io.arena import READY, Arena, Unit
from bootseer.checkpoint.versions.resolve import Pinned
from bootseer.ipc.channel import Channel
from bootseer.ipc.listener import Listener
from bootseer.storage.engine.extents import Extents

SEND_LIMIT_S = 5.0  # a rank that reads nothing for so long loses its connection
ALIVE_S = 5.0
MAX_UNITS = 1 << 20  # of one request
SOCKET_NAME = "socket"


class _Client:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = Channel(connection)
        self.rank: int | None = None


class _UnitRequest:
    def __init__(self, client: _Client, number: int, missing: set[Unit]) -> None:
        self.client = client
        self.number = number
        self.missing = missing
        self.failed: list[Unit] = []
        self.why = ""


class ArenaServer:
    """See the module's docstring. Runs on the service's loop."""

    def __init__(
        self,
        folder: str,
        selector: selectors.BaseSelector,
        want: Callable[[list[Unit]], dict[Unit, str]],
        done: Callable[[], object],
        taken: Callable[[], object] = lambda: None,
    ) -> None:
        """`want`: starts fetching units; returns those that cannot be fetched, and why. `done`: a rank has its
        part, has connected or has disconnected. `taken`: another service has taken over the arena."""
        self._selector = selector
        self._want = want
        self._on_done, self._on_taken = done, taken
        self._clients: dict[int, _Client] = {}
        self._questions: dict[Unit, list[_UnitRequest]] = {}
        self._alive_s = 0.0
        self._arena: Arena | None = None
        self._pinned: Pinned | None = None
        self.asked: dict[str, Extents] = {}  # what ranks have read
        self.done: set[int] = set()  # ranks that have their part
        self.is_used = False  # ranks have its memory, or can get it at any time
        self.address = os.path.join(folder, SOCKET_NAME)
        self._listener = Listener(self.address, selector, self._take_client)

    def serve(self, arena: Arena, pinned: Pinned) -> None:
        """Serve this arena from now on; ranks of another version are disconnected."""
        for client in list(self._clients.values()):
            self._drop(client)
        self._arena, self._pinned = arena, pinned
        self.asked = {}
        self.done = set()
        self.is_used = False

    def begin_attempt(self) -> None:
        """Reset the records of reads for new ranks."""
        self.asked = {}
        self.done = set()

    @property
    def attached(self) -> int:
        """Number of connected ranks."""
        return len(self._clients)

    def drain(self) -> None:
        """Receive all messages that ranks have sent by now."""
        for client in list(self._clients.values()):
            while client.connection.fileno() in self._clients and self._hear(client):
                pass

    def resolve_units(self, units: Iterable[Unit], why: str) -> None:
        """Record that units are ready, or, with `why`, that they cannot be fetched."""
        for unit in units:
            for question in self._questions.pop(unit, ()):
                question.missing.discard(unit)
                if why:
                    question.failed.append(unit)
                    question.why = why
                if not question.missing:
                    self._answer(question)

    def wanted(self) -> list[Unit]:
        """Return all units that ranks wait for."""
        return sorted(self._questions)

    def tick(self) -> None:
        """Send keepalives to waiting ranks."""
        now_s = time.monotonic()
        if self._questions and now_s - self._alive_s > ALIVE_S:
            self._alive_s = now_s
            for client in {each.client for questions in self._questions.values() for each in questions}:
                client.lines.send({"id": 0})

    def close(self) -> None:
        for client in list(self._clients.values()):
            self._drop(client)
        self._listener.close()

    # ---- clients ---------------------------------------------------------------------------------------------

    def _take_client(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_LIMIT_S)
        client = _Client(connection)
        self._selector.register(connection.fileno(), selectors.EVENT_READ, lambda: self._hear(client))
        self._clients[connection.fileno()] = client

    def _hear(self, client: _Client) -> bool:
        """Receive messages of a rank; return whether there were any."""
        if client.connection.fileno() < 0:
            return False  # dropped before its event was handled
        lines = client.lines.receive_ready()
        try:
            for line in lines or ():
                self._take(client, line)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError, OSError):
            lines = None
        if lines is None:
            self._drop(client)
            self._on_done()
        return bool(lines)

    def _drop(self, client: _Client) -> None:
        fd = client.connection.fileno()
        if self._clients.pop(fd, None) is not None:
            self._selector.unregister(fd)
            client.connection.close()
        for unit, questions in list(self._questions.items()):
            left = [each for each in questions if each.client is not client]
            if left:
                self._questions[unit] = left
            else:
                del self._questions[unit]

    def _take(self, client: _Client, line: dict[str, Any]) -> None:
        arena, pinned = self._arena, self._pinned
        assert arena is not None and pinned is not None
        match line["do"]:
            case "attach":
                self._attach(client, arena, pinned, str(line["digest"]), int(line.get("rank", -1)))
            case "file":
                file = self._check_file(arena, int(line["file"]))
                client.lines.send({"why": ""})
                socket.send_fds(client.connection, [b"\n"], [arena.fds[file]])
            case "want":
                self._ask(client, arena, int(line["id"]), line["units"])
            case "asked":
                for file, start, end in line["spans"]:
                    found = arena.files[self._check_file(arena, int(file))]
                    if not 0 <= int(start) < int(end) <= found.size:
                        raise ValueError(line)
                    self.asked.setdefault(found.path, Extents()).add(int(start), int(end))
            case "done":
                if client.rank is not None and client.rank >= 0:
                    self.done.add(client.rank)
            case "taken":
                self._on_taken()
            case _:
                raise ValueError(line)

    def _attach(self, client: _Client, arena: Arena, pinned: Pinned, digest: str, rank: int) -> None:
        if digest != pinned.digest:
            client.lines.send({"why": f"the arena holds version {pinned.version or pinned.digest[:12]}"})
            return
        client.rank = rank
        self.is_used = True
        self.done.discard(rank)  # it needs more
        files = [
            [file.path, file.size, length] for file, length in zip(arena.files, arena.unit_bytes, strict=True)
        ]
        client.lines.send({"why": "", "version": pinned.version, "digest": digest, "files": files})
        socket.send_fds(client.connection, [b"\n"], [arena.states_fd])

    def _ask(self, client: _Client, arena: Arena, number: int, spans: list[list[int]]) -> None:
        missing: set[Unit] = set()
        for file, first, end in spans:
            units = arena.units_of(self._check_file(arena, int(file)))
            if not 0 <= int(first) < int(end) <= len(units) or len(missing) + end - first > MAX_UNITS:
                raise ValueError(spans)
            missing.update((file, unit) for unit in range(first, end) if arena.state(file, unit) != READY)
        question = _UnitRequest(client, number, missing)
        if missing:
            for unit in missing:
                self._questions.setdefault(unit, []).append(question)
            refused = self._want(sorted(missing))
            for unit, why in refused.items():
                self.resolve_units([unit], why)
        else:
            self._answer(question)

    def _answer(self, question: _UnitRequest) -> None:
        question.client.lines.send({"id": question.number, "failed": question.failed, "why": question.why})

    def _check_file(self, arena: Arena, file: int) -> int:
        if not 0 <= file < len(arena.files):
            raise ValueError(file)
        return file
