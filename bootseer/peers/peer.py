"""A peer from a reader's view: its connections, and reads of ranges one after the other.

Bytes go from the socket directly into the caller's memory. A read never raises. It returns the number of valid
bytes from the start of the memory, and how it ended. Connections are kept open; they belong to no event loop, and
a forked child starts without any. Proxy settings of the environment are not used.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from bootseer.peers import wire
from bootseer.peers.link import Link, NotReadyError, RangeRead, ReadOutcome
from bootseer.peers.membership import Node
from bootseer.peers.spans import ObjectName

MAX_IDLE = 16  # connections
IDLE_S = 55.0  # less than the timeout of servers


class ReadResult(NamedTuple):
    have: int  # bytes
    ending: ReadOutcome
    lived: bool  # it sent a sign of life


class Peer:
    """A peer. Args: own: id of this node. key: of the job."""

    def __init__(self, node: Node, own: str, key: bytes) -> None:
        self.node = node
        self._own, self._key = own, key
        self._idle: list[tuple[Link, float]] = []  # the last used one at the end
        self._pid = os.getpid()
        self._is_closed = False

    async def read(
        self, name: ObjectName, start: int, view: memoryview, late_s: Callable[[], float]
    ) -> ReadResult:
        """Fill `view`, which is in one span, from `start` of the object. Args: late_s: returns the time limit.

        After a return or cancellation, nothing writes to `view` any more.
        """
        read = RangeRead(name, start, view, late_s)
        try:
            async with asyncio.timeout(None) as scope:
                read.watch(scope)
                ending = await self._read(read)
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

    def is_for(self, node: Node, own: str, key: bytes) -> bool:
        """Return whether it is the same node, address and job."""
        return (node, own, key) == (self.node, self._own, self._key)

    def close(self) -> None:
        """Close idle connections; reads in flight continue."""
        self._is_closed = True
        self._forget_if_forked()
        while self._idle:
            self._idle.pop()[0].close()

    async def _read(self, read: RangeRead) -> ReadOutcome:
        kept = self._take()
        if kept is not None:
            try:
                return await self._exchange(kept, read)
            except ConnectionError:
                if read.lived:
                    raise
                # The server closed it at the moment of reuse, which does not mean a fault of the peer.
        return await self._exchange(await self._open(), read)

    async def _exchange(self, link: Link, read: RangeRead) -> ReadOutcome:
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

    def _take(self) -> Link | None:
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

    async def _open(self) -> Link:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in self.node.address else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.sock_connect(sock, (self.node.address, self.node.port))
            link = Link(sock)
            await link.greet(self._own, self.node.id, self._key)
        except BaseException:
            sock.close()
            raise
        return link
