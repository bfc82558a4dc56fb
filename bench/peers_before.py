"""The former reader of peers, for `bench peers`: a future for each receive call, and a moved timer after each.

A copy of `bootseer/peers/peer.py` at commit 54f41528e, before `link.py`. Its two result types are imported, as
`PeerSet` compares them.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from bootseer.peers import wire
from bootseer.peers.auth import NONCE_BYTES, Handshake, Session
from bootseer.peers.link import ReadOutcome
from bootseer.peers.membership import Node
from bootseer.peers.peer import ReadResult
from bootseer.peers.spans import ObjectName
from bootseer.tuning import current

MAX_IDLE = 16  # connections
IDLE_S = 55.0  # less than the timeout of servers
STEP_BYTES = 1 << 20  # per receive call
_RECEIVED_BYTES = 4096


class _NotReadyError(Exception):
    """The peer does not know this node yet."""


class Peer:
    """A peer. Args: own: id of this node. key: of the job."""

    def __init__(self, node: Node, own: str, key: bytes) -> None:
        self.node = node
        self._own, self._key = own, key
        self._idle: list[tuple[_Link, float]] = []  # the last used one at the end
        self._pid = os.getpid()
        self._is_closed = False

    async def read(
        self, name: ObjectName, start: int, view: memoryview, late_s: Callable[[], float]
    ) -> ReadResult:
        """Fill `view`, which is in one span, from `start` of the object. Args: late_s: returns the time limit.

        After a return or cancellation, nothing writes to `view` any more.
        """
        read = _Read(name, start, view, asyncio.get_running_loop().time(), late_s)
        try:
            async with asyncio.timeout(current().peers.begin_s) as read.scope:
                ending = await self._read(read)
        except TimeoutError:
            ending = ReadOutcome.LATE
        except _NotReadyError:
            ending = ReadOutcome.NO_ROOM
        except wire.WireError:
            ending = ReadOutcome.FOREIGN
        except OSError:
            ending = ReadOutcome.LOST
        return ReadResult(read.have, ending, read.lived)

    def is_for(self, node: Node, own: str, key: bytes) -> bool:
        """Return whether it is the same node, address and job."""
        return (node, own, key) == (self.node, self._own, self._key)

    def close(self) -> None:
        """Close idle connections; reads in flight continue."""
        self._is_closed = True
        self._forget_if_forked()
        while self._idle:
            self._idle.pop()[0].close()

    async def _read(self, read: _Read) -> ReadOutcome:
        kept = self._take()
        if kept is not None:
            try:
                return await self._exchange(kept, read)
            except ConnectionError:
                if read.lived:
                    raise
                # The server closed it at the moment of reuse, which does not mean a fault of the peer.
        return await self._exchange(await self._open(), read)

    async def _exchange(self, link: _Link, read: _Read) -> ReadOutcome:
        try:
            ending = await link.read(read)
        except BaseException:
            link.close()
            raise
        self._forget_if_forked()
        if self._is_closed or len(self._idle) >= MAX_IDLE:
            link.close()
        else:
            self._idle.append((link, time.monotonic()))
        return ending

    def _take(self) -> _Link | None:
        self._forget_if_forked()
        while True:
            try:
                link, since_s = self._idle.pop()
            except IndexError:
                return None
            if time.monotonic() - since_s < IDLE_S and not link.has_input():
                return link
            link.close()

    def _forget_if_forked(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            idle, self._idle = self._idle, []
            for link, _ in idle:
                link.close()  # the parent keeps its own

    async def _open(self) -> _Link:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in self.node.address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, (self.node.address, self.node.port))
            link = _Link(sock)
            await link.greet(self._own, self.node.id, self._key)
        except BaseException:
            sock.close()
            raise
        return link


class _Read:
    def __init__(
        self, name: ObjectName, start: int, view: memoryview, began_s: float, late_s: Callable[[], float]
    ) -> None:
        self.name, self.start, self.view = name, start, view
        self._began_s, self._late_s = began_s, late_s
        self._stall_s = current().peers.stall_s
        self.have = 0
        self.lived = False
        self.scope: asyncio.Timeout | None = None

    def record_life(self, now_s: float) -> None:
        """Record a sign of life or bytes, and extend the time limit."""
        self.lived = True
        if self.scope is not None and not self.scope.expired():
            self.scope.reschedule(min(now_s + self._stall_s, self._began_s + self._late_s()))


class _Link:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting = bytearray()
        self._session: Session | None = None

    async def greet(self, own: str, other: str, key: bytes) -> None:
        """Perform the handshake. Raises: wire.WireError if it is not the expected peer."""
        nonce = os.urandom(NONCE_BYTES)
        await self._send(wire.write_hello(wire.Hello(own, other, nonce)))
        answer = await self._head()
        if answer.status == 503:
            raise _NotReadyError
        if answer.status != 200 or answer.length:
            raise wire.WireError(f"was refused ({answer.status})")
        greeting = Handshake(own, other, nonce, wire.read_nonce(answer.headers))
        if not greeting.is_server(key, answer.headers.get("bootseer-proof", "")):
            raise wire.WireError("does not have the key of the job")
        self._session = greeting.session(key)

    async def read(self, read: _Read) -> ReadOutcome:
        """Request a range. Raises: wire.WireError, OSError; the connection cannot be reused then."""
        assert self._session is not None
        target, etag = wire.target_of(read.name), wire.etag_of(read.name)
        end = read.start + len(read.view)
        asked = wire.range_of(read.start, end)
        await self._send(wire.write_ask(target, asked, etag, self._session.sign(target, asked, etag)))
        loop = asyncio.get_running_loop()
        while (answer := await self._head()).status == 102:
            read.record_life(loop.time())
        read.record_life(loop.time())
        if answer.status != 206:
            if answer.length:
                raise wire.WireError("an unexpected answer with a body")
            if answer.status == 503:
                return ReadOutcome.NO_ROOM
            if answer.status in (404, 416, 502):
                return ReadOutcome.HAS_NOT
            raise wire.WireError(f"was refused ({answer.status})")
        wire.check_part(answer, read.start, end)
        await self._body(read)
        return ReadOutcome.DONE

    async def _body(self, read: _Read) -> None:
        loop, size = asyncio.get_running_loop(), len(read.view)
        count = min(len(self._waiting), size)
        read.view[:count] = self._waiting[:count]
        del self._waiting[:count]
        read.have = count
        if self._waiting:
            raise wire.WireError("more bytes than requested")
        while read.have < size:
            count = await loop.sock_recv_into(self._sock, read.view[read.have : read.have + STEP_BYTES])
            if not count:
                raise ConnectionResetError("the connection was closed before all bytes arrived")
            read.have += count
            read.record_life(loop.time())

    async def _send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def _head(self) -> wire.Answer:
        loop = asyncio.get_running_loop()
        while (place := self._waiting.find(wire.END)) < 0:
            if len(self._waiting) > wire.MAX_HEAD_BYTES:
                raise wire.WireError("a head that is too long")
            data = await loop.sock_recv(self._sock, _RECEIVED_BYTES)
            if not data:
                raise ConnectionResetError("the connection was closed")
            self._waiting += data
        head = bytes(self._waiting[:place])
        del self._waiting[: place + len(wire.END)]
        return wire.read_answer(head)

    def has_input(self) -> bool:
        """Return whether unrequested input arrived, which nearly always is the end of the connection."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        with suppress(OSError):
            self._sock.close()
