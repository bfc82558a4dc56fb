"""One accepted connection of the coordinator: socket, wire, and data that the socket did not accept yet.

Thousands of these exist at once, so they hold little and decide nothing.
"""

from __future__ import annotations

import socket
import sys
from collections import deque
from collections.abc import Callable

from launcher.rendezvous import codec
from launcher.rendezvous.endpoint import is_loopback, plain_address
from launcher.rendezvous.messages import FromCoordinator
from launcher.rendezvous.session import MessageSession
from launcher.rendezvous.wire import Wire

SHARE_BYTES = 2048  # from this size on, a payload for many nodes is queued by reference
MAX_QUEUED_BYTES = 4 * 1024 * 1024  # for one node that does not read


class AcceptedPeer:
    """A connected client or node. `until_s` is the deadline of its handshake, or of its closing."""

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
        deliver: Callable[[AcceptedPeer, FromCoordinator], object],
    ) -> None:
        self.sock = sock
        self.wire = wire
        self.until_s = until_s
        self._deliver = deliver
        self.node = -1  # number at the JobHost, once it has joined
        self.heard_s = 0.0
        self.asked = False  # its Environment was requested
        self.is_ending = False  # no more messages are expected or accepted
        self.is_finished = False  # ... except its last events
        self.is_silent = False  # the JobHost knows about its silence
        self.is_given_up = False  # the job has continued without it; messages wait until it reads
        self.token = ""  # identifies it on a new connection; "" until it has joined
        self.session = MessageSession()
        self.queue: deque[bytes | memoryview] | None = None
        self.queued = 0

    def deliver(self, message: FromCoordinator) -> None:
        """Deliver a message; called by the JobHost."""
        self._deliver(self, message)

    def send(self, *chunks: bytes) -> int:
        """Send data as the socket accepts it, and queue the rest; return the bytes sent. Raises: OSError."""
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
        """Send queued data as the socket accepts it; return the bytes sent. Raises: OSError."""
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

    def take_over(self, other: AcceptedPeer) -> None:
        """Continue on the connection of another peer, which then holds nothing."""
        self.sock, other.sock = other.sock, self.sock
        self.wire, other.is_ending = other.wire, True
        self.queue, self.queued = other.queue, other.queued
        self.heard_s, self.is_silent = other.heard_s, False

    @property
    def is_cut(self) -> bool:
        """Whether it has no connection at present."""
        return self.sock.fileno() < 0

    def takes_all(self) -> bool:
        """Return whether all sent data has arrived at its machine."""
        return self.queue is None and count_unsent(self.sock) == 0

    def name(self) -> str:
        """Return its address, for users."""
        try:
            return plain_address(str(self.sock.getpeername()[0]))
        except OSError:
            return "an unknown address"

    def own_name(self) -> str:
        """Return the address of this node that it has reached, "" if other hosts cannot use it."""
        try:
            found = plain_address(str(self.sock.getsockname()[0]))
        except OSError:
            return ""
        return "" if is_loopback(found) else found

    def has_unread(self) -> bool:
        """Return whether data from it waits to be read."""
        try:
            return bool(self.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except OSError:
            return False


class SharedFrames:
    """Encodes messages; several that are the same for all nodes in a row (Stop, Note, Finish) only once."""

    def __init__(self) -> None:
        self._message: FromCoordinator | None = None
        self._encoded: tuple[int, bytes] = (0, b"")

    def pack(self, wire: Wire, message: FromCoordinator) -> tuple[bytes, ...]:
        """Return the chunks to send for a message on a connection."""
        if type(self._message) is not type(message) or self._message != message:
            self._message, self._encoded = message, codec.encode(message)
        tag, payload = self._encoded
        if len(payload) < SHARE_BYTES:
            return (wire.pack_encoded(tag, payload),)
        head, mac = wire.pack_around(tag, payload)
        return (head, payload, mac) if mac else (head, payload)


def count_unsent(sock: socket.socket) -> int:
    """Return the number of bytes that the other side's TCP has not confirmed."""
    import fcntl
    import termios

    try:
        return int.from_bytes(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)), sys.byteorder)
    except OSError:
        return 0


def cut_off(error: OSError) -> str:
    """Return a predicate of the other side for an error of a connection."""
    return f"was cut off ({(error.strerror or 'unknown error').lower()})"
