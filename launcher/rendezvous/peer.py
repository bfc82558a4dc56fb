"""One accepted connection of the coordinator: socket, wire, and what the socket could not take yet.

Thousands of these exist at once, so they hold little and decide nothing.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Callable

from launcher.rendezvous.endpoint import is_loopback, plain_address
from launcher.rendezvous.messages import FromCoordinator
from launcher.rendezvous.session import Session
from launcher.rendezvous.wire import Wire

MOST_QUEUED_BYTES = 4 * 1024 * 1024  # for one node that does not read


class Peer:
    """`until_s` is when its patience ends: of the handshake, or of the goodbye."""

    __slots__ = (
        "_deliver",
        "asked",
        "heard_s",
        "is_ending",
        "is_finished",
        "is_given_up",
        "is_silent",
        "node",
        "queue",
        "queued",
        "session",
        "sock",
        "token",
        "until_s",
        "wire",
    )

    def __init__(
        self,
        sock: socket.socket,
        wire: Wire,
        until_s: float,
        deliver: Callable[[Peer, FromCoordinator], object],
    ) -> None:
        self.sock = sock
        self.wire = wire
        self.until_s = until_s
        self._deliver = deliver
        self.node = -1  # number at the JobHost, once it has joined
        self.heard_s = 0.0
        self.asked = False  # for its Environment
        self.is_ending = False  # nothing more is expected from it, or wanted
        self.is_finished = False  # ... but its last events
        self.is_silent = False  # the JobHost knows that nothing is heard of it
        self.is_given_up = False  # the job has gone on; what is sent waits until it reads
        self.token = ""  # by which it proves who it is on a new connection; "" until it has joined
        self.session = Session()
        self.queue: deque[bytes | memoryview] | None = None
        self.queued = 0

    def deliver(self, message: FromCoordinator) -> None:
        """What the JobHost calls."""
        self._deliver(self, message)

    def send(self, *chunks: bytes) -> int:
        """Sends what the socket takes now, queues the rest; returns the bytes sent; raises OSError."""
        total = 0
        for data in chunks:
            rest: bytes | memoryview = data
            if self.queue is None:
                try:
                    sent = self.sock.send(data)
                except (BlockingIOError, InterruptedError):
                    sent = 0
                total += sent
                if sent == len(data):
                    continue
                rest = memoryview(data)[sent:]
                self.queue = deque()
            self.queue.append(rest)
            self.queued += len(rest)
        return total

    def flush(self) -> int:
        """Sends from the queue what the socket takes now; returns the bytes sent; raises OSError."""
        total = 0
        while self.queue:
            data = self.queue[0]
            try:
                sent = self.sock.send(data)
            except (BlockingIOError, InterruptedError):
                return total
            total += sent
            self.queued -= sent
            if sent < len(data):
                self.queue[0] = memoryview(data)[sent:]
            else:
                self.queue.popleft()
        self.queue = None
        return total

    def take_over(self, other: Peer) -> None:
        """Goes on over the connection of another one, which holds nothing from then on."""
        self.sock, other.sock = other.sock, self.sock
        self.wire, other.is_ending = other.wire, True
        self.queue, self.queued = other.queue, other.queued
        self.heard_s, self.is_silent = other.heard_s, False

    @property
    def is_cut(self) -> bool:
        """Whether it has no connection at present."""
        return self.sock.fileno() < 0

    def takes_all(self) -> bool:
        """Whether all that was sent has arrived at its machine."""
        return self.queue is None and count_unsent(self.sock) == 0

    def name(self) -> str:
        """Its address, for people."""
        try:
            return plain_address(str(self.sock.getpeername()[0]))
        except OSError:
            return "an address that is gone"

    def own_name(self) -> str:
        """The address of this node that it has reached, "" where that says nothing to other hosts."""
        try:
            found = plain_address(str(self.sock.getsockname()[0]))
        except OSError:
            return ""
        return "" if is_loopback(found) else found

    def has_unread(self) -> bool:
        """Whether something it has sent waits to be read."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False


def count_unsent(sock: socket.socket) -> int:
    """Bytes that the other side's TCP has not confirmed."""
    import fcntl
    import termios

    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def cut_off(error: OSError) -> str:
    """What an error of a connection says about the other side."""
    return f"was cut off ({(error.strerror or 'unknown error').lower()})"
