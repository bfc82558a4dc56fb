"""A connection to a peer, and a read over it: heads are parsed, bodies go directly into the caller's memory.

While an answer is awaited, the loop calls the receiver whenever the socket is readable: no future and no change of
the selector for each step. Between reads a connection belongs to no event loop. In a body the kernel reports the
socket only when LOW_WATER_BYTES or the rest have arrived: a step costs more than the copy of a packet.
"""

from __future__ import annotations

import asyncio
import math
import os
import select
import socket
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from functools import partial
from typing import Generic, TypeVar

from bootseer.peers import wire
from bootseer.peers.auth import NONCE_BYTES, Handshake, Session
from bootseer.peers.spans import ObjectName
from bootseer.tuning import current

LOW_WATER_BYTES = 256 << 10
WINDOW_BYTES = 4 * LOW_WATER_BYTES  # of a connection at least: the peer sends on while the reader is not yet woken
LOOKS = 4  # in the time of a stall: bytes below the low water are a sign of life, too
_RECEIVED_BYTES = 4096

T = TypeVar("T")


class ReadOutcome(Enum):
    """How a read ended."""

    DONE = "done"
    HAS_NOT = "has_not"  # the store did not return it, or it does not exist
    NO_ROOM = "no_room"  # or it does not know this node yet
    LATE = "late"
    LOST = "lost"  # no connection, or a broken one
    FOREIGN = "foreign"  # another key, another job, another program


class NotReadyError(Exception):
    """The peer does not know this node yet."""


class RangeRead:
    """A read of a range into `view`, and its time limit. Args: late_s: returns the limit, from the beginning."""

    def __init__(self, name: ObjectName, start: int, view: memoryview, late_s: Callable[[], float]) -> None:
        self.name, self.start, self.view = name, start, view
        self.have = 0  # valid bytes
        self.lived = False  # the peer sent a sign of life
        self.in_body = False
        self.receive: Callable[[], bool] | None = None  # take what has arrived; return whether the answer ended
        limits = current().peers
        self._loop = asyncio.get_running_loop()
        self._late_s, self._stall_s = late_s, limits.stall_s
        self._began_s = self._lived_s = self._loop.time()
        self._first_s = self._began_s + limits.begin_s
        self._scope: asyncio.Timeout | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def end_s(self) -> float:
        """Time at which it is late if nothing more arrives."""
        if not self.lived:
            return self._first_s
        return min(self._lived_s + self._stall_s, self._began_s + self._late_s())

    def watch(self, scope: asyncio.Timeout) -> None:
        """End `scope` when it is late. Call `close` at the end."""
        self._scope = scope
        self._look_before(self._first_s)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def record_life(self) -> None:
        """Record a sign of life or bytes, and extend the time limit."""
        self._lived_s = self._loop.time()
        if not self.lived:
            self.lived = True
            if self._timer is not None and self.end_s < self._timer.when():
                self._timer.cancel()
                self._look_before(self.end_s)

    def _look_before(self, end_s: float) -> None:
        # A timer for many steps: to move one at each step costs as much as the copy of 50 kB.
        self._timer = self._loop.call_at(min(end_s, self._loop.time() + self._stall_s / LOOKS), self._look)

    def _look(self) -> None:
        has_ended = self.receive is not None and self.receive()
        if has_ended:  # the result is on its way
            self._look_before(math.inf)
        elif self._loop.time() < self.end_s:
            self._look_before(self.end_s)
        elif self._scope is not None:
            self._scope.reschedule(self._loop.time())


class Link:
    """A connection to a peer. Args: sock: connected and non-blocking."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._waiting = bytearray()
        self._session: Session | None = None
        self._low_water_bytes = 1
        for count in (WINDOW_BYTES, 1):  # the kernel enlarges the receive buffer for a low water, and keeps it so
            self._report_at(count)
        # Older kernels do not, or have a small limit: then a peer could not send as much as the reader waits for.
        buffer_bytes = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        self._most_bytes = max(1, min(LOW_WATER_BYTES, buffer_bytes // 4))

    async def greet(self, own: str, other: str, key: bytes) -> None:
        """Perform the handshake. Raises: wire.WireError if it is not the expected peer."""
        nonce = os.urandom(NONCE_BYTES)
        await self._send(wire.write_hello(wire.Hello(own, other, nonce)))
        answer = await self._receive(self._take_head)
        if answer.status == 503:
            raise NotReadyError
        if answer.status != 200 or answer.length:
            raise wire.WireError(f"was refused ({answer.status})")
        greeting = Handshake(own, other, nonce, wire.read_nonce(answer.headers))
        if not greeting.is_server(key, answer.headers.get("bootseer-proof", "")):
            raise wire.WireError("does not have the key of the job")
        self._session = greeting.session(key)

    async def read(self, read: RangeRead) -> ReadOutcome:
        """Request a range. Raises: wire.WireError, OSError; the connection cannot be reused then."""
        assert self._session is not None
        target, etag = wire.target_of(read.name), wire.etag_of(read.name)
        asked = wire.range_of(read.start, read.start + len(read.view))
        await self._send(wire.write_ask(target, asked, etag, self._session.sign(target, asked, etag)))
        return await self._receive(partial(self._take, read), read)

    def has_input(self) -> bool:
        """Return whether unrequested input arrived, which nearly always is the end of the connection."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        with suppress(OSError):
            self._sock.close()

    # ---- sending and receiving -----------------------------------------------------------------------------

    async def _send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._sock, data)

    async def _receive(self, take: Callable[[], T | None], read: RangeRead | None = None) -> T:
        """Call `take` whenever the socket is readable, until it returns a result, and return that.

        After a cancellation it is not called any more, from the moment of `Task.cancel`.
        """
        loop, receiver = asyncio.get_running_loop(), _Receiver(take)
        number = self._sock.fileno()  # with the socket itself, the selector would format its addresses
        loop.add_reader(number, receiver.receive)
        if read is not None:
            read.receive = receiver.receive
        try:
            return await receiver.result()
        finally:
            loop.remove_reader(number)
            if read is not None:
                read.receive = None

    def _take_head(self) -> wire.Answer | None:
        """Receive a part of a head. Return the head if it is complete."""
        place = self._waiting.find(wire.END)
        if place < 0:
            if len(self._waiting) > wire.MAX_HEAD_BYTES:
                raise wire.WireError("a head that is too long")
            data = self._sock.recv(_RECEIVED_BYTES)
            if not data:
                raise ConnectionResetError("the connection was closed")
            self._waiting += data
            place = self._waiting.find(wire.END)
            if place < 0:
                return None
        head = bytes(self._waiting[:place])
        del self._waiting[: place + len(wire.END)]
        return wire.read_answer(head)

    def _take(self, read: RangeRead) -> ReadOutcome | None:
        """Receive a part of an answer. Return how it ended if it is complete."""
        if read.in_body:
            return self._take_body(read)
        answer = self._take_head()
        while answer is not None:
            read.record_life()
            if answer.status != 102:
                break
            answer = self._take_head() if wire.END in self._waiting else None
        if answer is None:
            return None
        if answer.status != 206:
            return _outcome_of(answer)
        wire.check_part(answer, read.start, read.start + len(read.view))
        read.in_body = True
        self._take_waiting(read)
        return self._wait_for_rest(read)

    def _take_body(self, read: RangeRead) -> ReadOutcome | None:
        """Receive a part of the body."""
        count = self._sock.recv_into(read.view[read.have :])
        if not count:
            raise ConnectionResetError("the connection was closed before all bytes arrived")
        read.have += count
        read.record_life()
        return self._wait_for_rest(read)

    def _take_waiting(self, read: RangeRead) -> None:
        """Take the beginning of the body, which came with the head."""
        read.have = min(len(self._waiting), len(read.view))
        read.view[: read.have] = self._waiting[: read.have]
        del self._waiting[: read.have]
        if self._waiting:
            raise wire.WireError("more bytes than requested")

    def _wait_for_rest(self, read: RangeRead) -> ReadOutcome | None:
        rest = len(read.view) - read.have
        self._report_at(min(rest, self._most_bytes) or 1)
        return None if rest else ReadOutcome.DONE

    def _report_at(self, count: int) -> None:
        """Let the kernel report the socket as readable when `count` bytes, an end or an error have arrived."""
        if count != self._low_water_bytes:
            with suppress(OSError):  # a kernel without it reports it more often
                self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, count)
                self._low_water_bytes = count


class _Receiver(Generic[T]):
    """A callback of the loop, and its result. Its future holds no error, as errors hold the caller's memory."""

    def __init__(self, take: Callable[[], T | None]) -> None:
        self._take = take
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._found: T | Exception | None = None

    def receive(self) -> bool:
        """Take what has arrived, unless it ended or was cancelled. Return whether it ended."""
        if not self._ended.done():
            try:
                self._found = self._take()
            except BlockingIOError:
                pass
            except Exception as error:
                self._found = error
            if self._found is not None:
                self._ended.set_result(None)
        return self._ended.done()

    async def result(self) -> T:
        """Wait for the result. Raises: the error of `take`."""
        try:
            await self._ended
            found = self._found
        finally:
            self._found = None  # an error holds this object
        assert found is not None
        try:
            if isinstance(found, Exception):
                raise found
            return found
        finally:
            del found


def _outcome_of(answer: wire.Answer) -> ReadOutcome:
    """Return what an answer without data means. Raises: wire.WireError."""
    if answer.length:
        raise wire.WireError("an unexpected answer with a body")
    if answer.status == 503:
        return ReadOutcome.NO_ROOM
    if answer.status in (404, 416, 502):
        return ReadOutcome.HAS_NOT
    raise wire.WireError(f"was refused ({answer.status})")
