"""Another reader of peers, for `bench peers`: a transport and an `asyncio.BufferedProtocol` for each connection.

As cheap as it can be: the transport stays open between reads, so a connection belongs to a loop, as those of the
product must not. Time limits and the low water are those of the product.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import cast

from bench import peers_before
from bootseer.peers import wire
from bootseer.peers.auth import NONCE_BYTES, Handshake, Session
from bootseer.peers.link import LOW_WATER_BYTES, WINDOW_BYTES, NotReadyError, RangeRead, ReadOutcome
from bootseer.peers.peer import ReadResult

_SCRATCH_BYTES = 4096


class BufferedLink(asyncio.BufferedProtocol):
    """A connection of one event loop."""

    def __init__(self, sock: socket.socket, low_water_bytes: int) -> None:
        self.is_lost = False
        self._sock, self._most_bytes = sock, low_water_bytes
        self._low_water_bytes = 1
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._waiting = bytearray()
        self._read: RangeRead | None = None
        self._ended: asyncio.Future[object] | None = None
        self._session: Session | None = None
        for count in (WINDOW_BYTES, 1):
            self._report_at(count)

    async def greet(self, own: str, other: str, key: bytes) -> None:
        nonce = os.urandom(NONCE_BYTES)
        answer = await self._ask(wire.write_hello(wire.Hello(own, other, nonce)))
        assert isinstance(answer, wire.Answer)
        if answer.status == 503:
            raise NotReadyError
        greeting = Handshake(own, other, nonce, wire.read_nonce(answer.headers))
        if not greeting.is_server(key, answer.headers.get("bootseer-proof", "")):
            raise wire.WireError("does not have the key of the job")
        self._session = greeting.session(key)

    async def read(self, read: RangeRead) -> ReadOutcome:
        assert self._session is not None
        target, etag = wire.target_of(read.name), wire.etag_of(read.name)
        asked = wire.range_of(read.start, read.start + len(read.view))
        self._read = read
        try:
            outcome = await self._ask(wire.write_ask(target, asked, etag, self._session.sign(target, asked, etag)))
        finally:
            self._read = None
        self._report_at(1)
        return cast(ReadOutcome, outcome)

    async def _ask(self, data: bytes) -> object:
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(data)
        return await self._ended

    def close(self) -> None:
        self._transport.abort()

    # ---- called by the loop --------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def get_buffer(self, _hint: int) -> memoryview:
        read = self._read
        return read.view[read.have :] if read is not None and read.in_body else self._scratch

    def buffer_updated(self, count: int) -> None:
        read = self._read
        try:
            if read is None or not read.in_body:
                self._waiting += self._scratch[:count]
                self._take_heads(read)
            else:
                read.have += count
                read.record_life()
            if read is not None and read.in_body:
                rest = len(read.view) - read.have
                if rest:
                    self._report_at(min(rest, self._most_bytes))
                else:
                    self._end(ReadOutcome.DONE)
        except wire.WireError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._fail(error or ConnectionResetError("the connection was closed"))

    # ---- heads ---------------------------------------------------------------------------------------------

    def _take_heads(self, read: RangeRead | None) -> None:
        while (place := self._waiting.find(wire.END)) >= 0:
            answer = wire.read_answer(bytes(self._waiting[:place]))
            del self._waiting[: place + len(wire.END)]
            if read is None:
                self._end(answer)
                return
            read.record_life()
            if answer.status == 206:
                wire.check_part(answer, read.start, read.start + len(read.view))
                read.in_body = True
                read.have = min(len(self._waiting), len(read.view))
                read.view[: read.have] = self._waiting[: read.have]
                del self._waiting[: read.have]
                return
            if answer.status != 102:
                self._end(ReadOutcome.NO_ROOM if answer.status == 503 else ReadOutcome.HAS_NOT)
                return

    def _end(self, what: object) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(what)

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)

    def _report_at(self, count: int) -> None:
        if self._most_bytes > 1 and count != self._low_water_bytes:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
            self._low_water_bytes = count


class BufferedPeer(peers_before.Peer):
    """A peer whose connections are transports."""

    low_water_bytes = 1

    async def read(self, name, start, view, late_s) -> ReadResult:  # type: ignore[no-untyped-def]
        read = RangeRead(name, start, view, late_s)
        try:
            async with asyncio.timeout(None) as scope:
                read.watch(scope)
                ending = await self._transfer(read)
        except TimeoutError:
            ending = ReadOutcome.LATE
        except NotReadyError:
            ending = ReadOutcome.NO_ROOM
        except wire.WireError:
            ending = ReadOutcome.FOREIGN
        except OSError:
            ending = ReadOutcome.LOST
        finally:
            read.close()
        return ReadResult(read.have, ending, read.lived)

    async def _transfer(self, read: RangeRead) -> ReadOutcome:
        idle = cast("list[tuple[BufferedLink, float]]", self._idle)
        link = None
        while idle and link is None:
            link, since_s = idle.pop()
            if link.is_lost or time.monotonic() - since_s >= peers_before.IDLE_S:
                link.close()
                link = None
        if link is None:
            link = await self._connect()
        try:
            ending = await link.read(read)
        except BaseException:
            link.close()
            raise
        idle.append((link, time.monotonic()))
        return ending

    async def _connect(self) -> BufferedLink:
        loop = asyncio.get_running_loop()
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await loop.sock_connect(sock, (self.node.address, self.node.port))
        _, link = await loop.create_connection(lambda: BufferedLink(sock, self.low_water_bytes), sock=sock)
        await link.greet(self._own, self.node.id, self._key)
        return link


class BufferedLowWaterPeer(BufferedPeer):
    """The same with the product's low water."""

    low_water_bytes = LOW_WATER_BYTES
