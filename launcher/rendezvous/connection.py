"""A node's connection to the coordinator: connect, handshake, messages, heartbeats, clock.

In: an address and messages to send. Out, by callback: open, messages, and the end with its reason (a predicate:
"closed the connection"). One attempt at one address; agent/member.py retries.
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple, cast

from launcher.base.loop import Cancellable, EventLoop
from launcher.rendezvous.clock import JobClock
from launcher.rendezvous.endpoint import plain_address, set_options
from launcher.rendezvous.messages import (
    Finish,
    FromCoordinator,
    FromMember,
    LivenessProbe,
    Ping,
    Pong,
    Refused,
    World,
)
from launcher.rendezvous.peer import count_unsent, cut_off
from launcher.rendezvous.resolve import Address
from launcher.rendezvous.session import MessageSession
from launcher.rendezvous.wire import NONCE_BYTES, Broken, Established, Reply, Trouble, Wire

FLUSH_S = 2.0  # for what is queued when the connection is closed
LAST_EVENTS_S = 1.0  # ... and for the last events, when the job is over
MAX_UNSENT_BYTES = 16 * 1024  # that heartbeats may have to wait for before something large is sent
_READ_BYTES = 64 * 1024


class Timing(NamedTuple):
    """Time limits of a connection."""

    connect_s: float = 10.0  # until the handshake is done
    ping_s: float = 5.0
    silence_s: float = 15.0
    # Quick pings after the first World improve the clocks' bound early: the first pause, doubled each time.
    first_ping_s: float = 0.02


class Ended(NamedTuple):
    """The reason for the end of a connection."""

    trouble: Trouble | None  # None: the network or the coordinator failed
    reason: str


class Callbacks(NamedTuple):
    """The callbacks of a connection; none is called from within a method of it."""

    opened: Callable[[str], object]  # the local address
    message: Callable[[FromCoordinator], object]
    ended: Callable[[Ended], object]  # at most once, never after `close`
    # Called after so many seconds of silence, beyond the limit; again at each heartbeat without an answer, and
    # with 0 as soon as a message arrives.
    silent: Callable[[float], object] = lambda _silence_s: None


class _State(Enum):
    LIVE = 0  # from the first attempt to connect on
    LAST = 1  # the coordinator has sent its last message; last events still go to it
    CLOSING = 2  # the queue is being sent
    OVER = 3  # the socket is closed


class Connection:
    """See the module's docstring."""

    __slots__ = (
        "_callbacks",
        "_clock",
        "_heard_s",
        "_is_deaf",
        "_is_silent",
        "_loop",
        "_next_ping_s",
        "_pause_s",
        "_queue",
        "_session",
        "_sock",
        "_state",
        "_timer",
        "_timer_due_s",
        "_timing",
        "_wire",
        "ships_events",
    )

    def __init__(
        self,
        loop: EventLoop,
        address: Address,
        port: int,
        secret: bytes | None,
        version: str,
        callbacks: Callbacks,
        timing: Timing | None = None,
        source: str = "",
        session: MessageSession | None = None,
        clock: JobClock | None = None,
    ) -> None:
        """Args: session, clock: of the connection that this one resumes."""
        self._loop = loop
        self._callbacks = callbacks
        self._timing = timing or Timing()
        self._wire = Wire(False, secret, version, os.urandom(NONCE_BYTES))
        self._clock = clock or JobClock()
        self._session = session or MessageSession()
        self._queue = b""
        self._state = _State.LIVE
        self._is_deaf = False  # the coordinator has closed its direction
        self._is_silent = False  # and this was reported
        self.ships_events = False  # so the end of the job is not the end of the connection
        self._heard_s = loop.time()
        self._next_ping_s = float("inf")
        self._pause_s = 0.0
        self._sock = socket.socket(address.family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        self._timer: Cancellable | None = loop.call_later(self._timing.connect_s, self._on_slow)
        self._timer_due_s = 0.0
        try:
            set_options(self._sock)
            if source:
                self._sock.bind((source, 0))
            number = self._sock.connect_ex(address.sockaddr(port))
        except OSError as error:
            number = error.errno or errno.EIO
        if number not in (0, errno.EINPROGRESS):
            loop.call_soon(self._end, None, os.strerror(number).lower())
            return
        loop.add_writer(self._sock.fileno(), self._on_connected)

    @property
    def is_over(self) -> bool:
        """Whether the socket is closed."""
        return self._state is _State.OVER

    def _is_live(self) -> bool:
        return self._state is _State.LIVE

    @property
    def is_last(self) -> bool:
        """Whether the job is over and `end_last` is waited for, within LAST_EVENTS_S."""
        return self._state is _State.LAST

    @property
    def is_idle(self) -> bool:
        """Whether nearly all data has arrived, so that new data does not delay urgent messages."""
        if self._queue or not self._wire.is_open or self._state not in (_State.LIVE, _State.LAST):
            return False
        return count_unsent(self._sock) <= MAX_UNSENT_BYTES

    @property
    def takes_all(self) -> bool:
        """Whether all sent data has arrived at the coordinator's machine."""
        return not self._queue and count_unsent(self._sock) == 0

    def to_job_clock(self, local_ns: int) -> tuple[int, int]:
        """See Link."""
        return self._clock.map(local_ns)

    def send(self, message: FromMember) -> None:
        """Send or queue a message; before `opened` and after the end, do nothing."""
        if self._wire.is_open and self._state in (_State.LIVE, _State.LAST):
            self._write(self._wire.pack(message))

    def close(self) -> None:
        """Send the queue within a time limit, then end without another callback."""
        if not self._is_live():
            self.end_last()
            return
        self._state = _State.CLOSING
        if not self._wire.is_open:
            self._drop()
            return
        self._set_timer(FLUSH_S, self._drop)
        if not self._queue:
            self._shut()

    def end_last(self) -> None:
        """After the last message: note that there are no more events to send."""
        if self._state is _State.LAST:
            self._state = _State.CLOSING
            if not self._queue:
                self._shut()

    # ---- connecting ------------------------------------------------------------------------------------------

    def _on_connected(self) -> None:
        self._loop.remove_writer(self._sock.fileno())
        number = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._end(None, os.strerror(number).lower())
            return
        try:
            itself = self._sock.getsockname() == self._sock.getpeername()
        except OSError as error:
            self._end(None, (error.strerror or "").lower())
            return
        if itself:
            # Both ends of one socket: TCP allows it if the target's port is in the range of local ports.
            self._end(None, os.strerror(errno.ECONNREFUSED).lower())
            return
        self._loop.add_reader(self._sock.fileno(), self._on_readable)
        self._write(self._wire.greeting())

    def _on_slow(self) -> None:
        self._end(Trouble.CUT, f"did not answer as a coordinator within {self._timing.connect_s:g} s")

    # ---- reading ---------------------------------------------------------------------------------------------

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(None, cut_off(error))
            return
        arrived_ns = time.monotonic_ns()
        if not self._is_live():
            if not data:
                self._on_deaf()
            return
        self._heard_s = self._loop.time()
        if self._is_silent and data:
            self._is_silent = False
            self._callbacks.silent(0.0)
        for event in self._wire.receive(data) if data else self._wire.end():
            self._on_event(event, arrived_ns)
            if not self._is_live():
                return

    def _on_deaf(self) -> None:
        """Handle the end of the coordinator's messages; it still reads."""
        self._is_deaf = True
        if self._state is _State.CLOSING:
            self._drop()
        else:
            self._loop.remove_reader(self._sock.fileno())

    def _on_event(self, event: object, arrived_ns: int) -> None:
        if isinstance(event, Pong):
            self._clock.add(event.local_ns, event.received_ns, event.sent_ns, arrived_ns)
            self._session.heard(event.received)
        elif isinstance(event, LivenessProbe):
            self.send(Ping(arrived_ns, self._session.received))
        elif isinstance(event, Reply):
            self._write(event.data)
        elif isinstance(event, Established):
            self._start_heart()
            self._callbacks.opened(plain_address(str(self._sock.getsockname()[0])))
        elif isinstance(event, Broken):
            self._end(event.trouble, event.reason)
        else:
            self._on_message(cast(FromCoordinator, event))

    def _on_message(self, message: FromCoordinator) -> None:
        self._session.receives(message)
        if isinstance(message, World) and not self._pause_s:
            self._pause_s = self._timing.first_ping_s
            self._next_ping_s = self._loop.time() + self._pause_s * _random()
            self._plan_beat()
        elif isinstance(message, Finish | Refused):
            # The last message: closing the connection confirms its arrival.
            if isinstance(message, Finish) and self.ships_events:
                self._state = _State.LAST
                self._set_timer(LAST_EVENTS_S, self._drop)
            else:
                self._drop()
        self._callbacks.message(message)

    # ---- heartbeats ------------------------------------------------------------------------------------------

    def _start_heart(self) -> None:
        now_s = self._loop.time()
        self._heard_s = now_s
        self._next_ping_s = now_s + self._timing.ping_s * (0.5 + 0.5 * _random())
        self._plan_beat()

    def _beat(self) -> None:
        now_s = self._loop.time()
        late_s = now_s - self._timer_due_s
        if late_s > 1.0:
            self._heard_s += late_s  # this process itself was suspended; answers may wait to be read
        if now_s - self._heard_s >= self._timing.silence_s:
            self._is_silent = True
            self._callbacks.silent(now_s - self._heard_s)
            if self._state is not _State.LIVE:
                return
        if now_s >= self._next_ping_s:
            self.send(Ping(time.monotonic_ns(), self._session.received))
            pause_s = self._timing.ping_s
            if 0 < self._pause_s < pause_s:
                pause_s, self._pause_s = self._pause_s, self._pause_s * 2
            # Avoids pings in step with the other nodes.
            self._next_ping_s = now_s + pause_s * (0.95 + 0.1 * _random())
        self._plan_beat()

    def _plan_beat(self) -> None:
        silent_s = self._heard_s + self._timing.silence_s
        is_silent = silent_s <= self._loop.time()
        self._timer_due_s = self._next_ping_s if is_silent else min(self._next_ping_s, silent_s)
        self._set_timer(max(0.0, self._timer_due_s - self._loop.time()), self._beat)

    def _set_timer(self, delay_s: float, callback: Callable[[], object]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, callback)

    # ---- writing ---------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        if self._state is _State.OVER:
            return
        sent = 0
        if not self._queue:
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                # An earlier message of the coordinator may still be unread: its reason is the better one.
                self._loop.call_soon(self._on_write_error, cut_off(error))
                return
            if sent < len(data):
                self._loop.add_writer(self._sock.fileno(), self._on_writable)
        self._queue += data[sent:]

    def _on_write_error(self, reason: str) -> None:
        while not self.is_over:
            before = self._heard_s
            self._on_readable()
            if self.is_over or self._heard_s == before:
                self._end(None, reason)
                return

    def _on_writable(self) -> None:
        try:
            sent = self._sock.send(self._queue)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._on_write_error(cut_off(error))
            return
        self._queue = self._queue[sent:]
        if not self._queue:
            self._loop.remove_writer(self._sock.fileno())
            if self._state is _State.CLOSING:
                self._shut()

    # ---- the end ---------------------------------------------------------------------------------------------

    def _shut(self) -> None:
        """Close one direction: a reset would discard data in flight."""
        if self._is_deaf:
            self._drop()  # no unread data is left that could cause a reset
            return
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._drop()

    def _end(self, trouble: Trouble | None, reason: str) -> None:
        if self._state is _State.OVER:
            return
        tell = self._state is _State.LIVE
        self._drop()
        if tell:
            self._callbacks.ended(Ended(trouble, reason))

    def _drop(self) -> None:
        if self._state is _State.OVER:
            return
        self._state = _State.OVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()


def _random() -> float:
    """Return a number between 0 and 1; the random module is not worth its import."""
    return int.from_bytes(os.urandom(2), "big") / 65536
