"""The TCP side of a coordinator: nodes connect, prove themselves, join; the JobHost decides everything else.

In: listening sockets and a JobHost. Out: messages to the JobHost, its answers to the nodes, nodes found lost. One
small object for each connection and one timer for all, so that ten thousand nodes are no burden. Nobody who has
not proven itself gets more than a few hundred bytes of memory and a few seconds. Reasons are predicates of a node
("closed the connection").
"""

from __future__ import annotations

import errno
import os
import resource
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, cast

from launcher.loop import Cancellable, EventLoop
from launcher.rendezvous import codec
from launcher.rendezvous.endpoint import Listener, plain_address
from launcher.rendezvous.host import JobHost
from launcher.rendezvous.messages import (
    Environment,
    Finish,
    FromCoordinator,
    FromMember,
    Join,
    Ping,
    Pong,
    Refused,
    WantEnvironment,
)
from launcher.rendezvous.wire import NONCE_BYTES, Broken, Established, Reply, Trouble, Wire

HELLO_S = 5.0  # from accept to Join
GOODBYE_S = 5.0  # for a node to close after the last word to it
REFUSAL_S = 1.0  # the same for who was turned away
MOST_PENDING = 2048  # connections that have not joined yet
MOST_QUEUED_BYTES = 4 * 1024 * 1024  # for one node that does not read
MOST_FILES = 128 * 1024
_ACCEPT_BATCH = 128
_READ_BYTES = 64 * 1024
_SHARE_BYTES = 2048  # from this size on, a payload for many nodes is queued by reference
_REPORT_S = 10.0  # one line about strange connections in this time
_RELISTEN_S = 0.1


class Limits(NamedTuple):
    """Times of the connections."""

    heartbeat_s: float = 15.0  # silence that makes a node lost
    hello_s: float = HELLO_S
    goodbye_s: float = GOODBYE_S


class _Peer:
    """A connection. `until_s` is when its patience ends: of the handshake, of a heartbeat, of a goodbye."""

    __slots__ = (
        "asked",
        "coordinator",
        "heard_s",
        "is_ending",
        "node",
        "queue",
        "queued",
        "sock",
        "until_s",
        "wire",
    )

    def __init__(self, coordinator: Coordinator, sock: socket.socket, wire: Wire, until_s: float) -> None:
        self.coordinator = coordinator
        self.sock = sock
        self.wire = wire
        self.node = -1  # number at the JobHost, once it has joined
        self.heard_s = 0.0
        self.until_s = until_s
        self.queue: deque[bytes | memoryview] | None = None
        self.queued = 0
        self.asked = False  # for its Environment
        self.is_ending = False  # nothing more is expected from it, or wanted

    def is_done(self) -> bool:
        return self.is_ending

    def deliver(self, message: FromCoordinator) -> None:
        self.coordinator._deliver(self, message)


class Coordinator:
    """See the module's docstring."""

    def __init__(
        self,
        loop: EventLoop,
        host: JobHost,
        listener: Listener,
        secret: bytes | None,
        version: str,
        say: Callable[[str], object],
        limits: Limits | None = None,
    ) -> None:
        self._loop = loop
        self._host = host
        self._listener = listener
        self._secret = secret
        self._version = version
        self._say = say
        self._limits = limits or Limits()
        self._pending: dict[_Peer, None] = {}  # oldest first
        self._members: dict[int, _Peer] = {}
        self._ending: dict[_Peer, None] = {}
        self._last_encoded: tuple[FromCoordinator | None, tuple[int, bytes]] = (None, (0, b""))
        self._sweep_timer: Cancellable | None = None
        self._sweep_due_s = 0.0
        self._relisten_timer: Cancellable | None = None
        self._is_listening = False
        self._is_accepting = False
        self._is_closing = False
        self.is_closed = False
        self._strange = 0
        self._strange_told = 0
        self._strange_told_s = -_REPORT_S
        self._accepted = self._refused = self._lost_count = self._bytes_in = self._bytes_out = 0
        host.on_listen = self.set_listening
        _raise_file_limit()
        self._start_accepting()

    @property
    def port(self) -> int:
        return self._listener.port

    def statistics(self) -> dict[str, int]:
        """Counters for the bench, the status command and the tests."""
        return {
            "pending": len(self._pending),
            "members": len(self._members),
            "ending": len(self._ending),
            "accepted": self._accepted,
            "refused": self._refused,
            "strange": self._strange,
            "lost": self._lost_count,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
        }

    # ---- listening -------------------------------------------------------------------------------------------

    def set_listening(self, on: bool) -> None:
        """Frees the port (rank 0 of a static job binds it) or takes it again; nodes stay connected."""
        if on:
            self.resume_listening()
        else:
            self.stop_listening()

    def stop_listening(self) -> None:
        if self._relisten_timer is not None:
            self._relisten_timer.cancel()
            self._relisten_timer = None
        self._stop_accepting()
        self._listener.close()
        self._is_listening = False

    def resume_listening(self) -> None:
        if self._is_listening or self._is_closing or self._relisten_timer is not None:
            return
        self._relisten(self._loop.time() + 5.0)

    def _relisten(self, patience_s: float) -> None:
        self._relisten_timer = None
        try:
            self._listener.open()
        except OSError as error:
            # What rank 0 has left behind may hold it a moment longer.
            if self._loop.time() > patience_s:
                self._say(
                    f"cannot listen on port {self.port} again: {error.strerror}; no node can join until it is free"
                )
                patience_s = float("inf")
            self._relisten_timer = self._loop.call_later(_RELISTEN_S, self._relisten, patience_s)
            return
        self._start_accepting()

    def _start_accepting(self) -> None:
        self._is_listening = self._is_accepting = True
        for sock in self._listener.sockets:
            self._loop.add_reader(sock.fileno(), self._on_acceptable, sock)

    def _stop_accepting(self) -> None:
        if self._is_accepting:
            self._is_accepting = False
            for sock in self._listener.sockets:
                self._loop.remove_reader(sock.fileno())

    def _on_acceptable(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPT_BATCH):
            if len(self._pending) >= MOST_PENDING and not self._make_room():
                # They wait in the kernel's queue; the sweep goes on with them.
                self._stop_accepting()
                self._plan_sweep()
                return
            try:
                sock, _ = listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._report(f"cannot accept more connections: {error.strerror}")
                    self._stop_accepting()
                    self._plan_sweep()
                    return
                continue  # that connection is gone already
            self._accept(sock)

    def _accept(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._accepted += 1
        wire = Wire(True, self._secret, self._version, os.urandom(NONCE_BYTES))
        peer = _Peer(self, sock, wire, self._loop.time() + self._limits.hello_s)
        self._pending[peer] = None
        self._loop.add_reader(sock.fileno(), self._on_readable, peer)
        self._plan_sweep()

    def _make_room(self) -> bool:
        """Who has been shaking hands for a second makes room: a node is done in a few round trips."""
        oldest = next(iter(self._pending))
        if oldest.until_s - self._limits.hello_s + 1.0 > self._loop.time():
            return False
        self._turn_away(oldest, "did not join in time while many others wait")
        return True

    # ---- reading ---------------------------------------------------------------------------------------------

    def _on_readable(self, peer: _Peer) -> None:
        received_ns = time.monotonic_ns()
        try:
            data = peer.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end_peer(peer, _cut_off(error))
            return
        if peer.is_ending:
            if not data:
                self._drop(peer)
            return
        if not data:
            for event in peer.wire.end():
                self._on_event(peer, event, received_ns)
            return
        self._bytes_in += len(data)
        peer.heard_s = self._loop.time()
        for event in peer.wire.receive(data):
            self._on_event(peer, event, received_ns)
            if peer.is_done():
                return

    def _on_event(self, peer: _Peer, event: object, received_ns: int) -> None:
        if isinstance(event, Ping):
            if peer.node >= 0:
                pong = Pong(event.local_ns, received_ns, time.monotonic_ns())
                self._write(peer, peer.wire.pack(pong))
            else:
                self._end_peer(peer, "sent a message before its Join")
        elif isinstance(event, Reply):
            self._write(peer, event.data)
        elif isinstance(event, Established):
            pass
        elif isinstance(event, Broken):
            self._on_broken(peer, event)
        elif isinstance(event, Join):
            self._on_join(peer, event)
        elif peer.node < 0:
            self._end_peer(peer, "sent a message before its Join")
        elif isinstance(event, Environment) and not peer.asked:
            self._end_peer(peer, "sent an Environment that nobody asked for")
        else:
            peer.asked = False
            self._host.receive(peer.node, cast(FromMember, event))

    def _on_broken(self, peer: _Peer, broken: Broken) -> None:
        if peer.node >= 0:
            self._end_peer(peer, broken.reason)
            return
        if broken.trouble is Trouble.CUT and not peer.wire.peer_version:
            self._turn_away(peer, "")  # a probe of the port (load balancers do that)
        else:
            self._turn_away(peer, broken.reason)

    def _on_join(self, peer: _Peer, join: Join) -> None:
        if peer.node >= 0:
            self._end_peer(peer, "sent a second Join")
            return
        if not join.address:
            join = join._replace(address=plain_address(_peer_name(peer)))
        del self._pending[peer]
        peer.node = self._host.attach(peer.deliver)
        self._members[peer.node] = peer
        self._host.receive(peer.node, join)
        if not self._is_accepting and self._is_listening:
            self._start_accepting()

    # ---- writing ---------------------------------------------------------------------------------------------

    def _deliver(self, peer: _Peer, message: FromCoordinator) -> None:
        """Called by the JobHost; must not call it back."""
        if peer.is_ending:
            return
        peer.asked = peer.asked or isinstance(message, WantEnvironment)
        self._write(peer, *self._frame(peer, message))
        if isinstance(message, Finish | Refused):
            self._refused += isinstance(message, Refused)
            self._begin_end(peer, self._limits.goodbye_s)
            if isinstance(message, Finish) and self._is_listening:
                self.stop_listening()  # the port is free for the next job

    def _frame(self, peer: _Peer, message: FromCoordinator) -> tuple[bytes, ...]:
        # Stop, Note and Finish go to all nodes alike.
        last, encoded = self._last_encoded
        if type(last) is not type(message) or last != message:
            encoded = codec.encode(message)
            self._last_encoded = (message, encoded)
        tag, payload = encoded
        if len(payload) < _SHARE_BYTES:
            return (peer.wire.pack_encoded(tag, payload),)
        head, mac = peer.wire.pack_around(tag, payload)
        return (head, payload, mac) if mac else (head, payload)

    def _write(self, peer: _Peer, *chunks: bytes) -> None:
        """Sends now what the socket takes, keeps the rest; failures are dealt with later, from the loop."""
        for data in chunks:
            rest: bytes | memoryview = data
            if peer.queue is None:
                try:
                    sent = peer.sock.send(data)
                except (BlockingIOError, InterruptedError):
                    sent = 0
                except OSError as error:
                    self._loop.call_soon(self._end_peer, peer, _cut_off(error))
                    return
                self._bytes_out += sent
                if sent == len(data):
                    continue
                rest = memoryview(data)[sent:]
                peer.queue = deque()
                self._loop.add_writer(peer.sock.fileno(), self._on_writable, peer)
            peer.queue.append(rest)
            peer.queued += len(rest)
        if peer.queued > MOST_QUEUED_BYTES:
            self._loop.call_soon(self._end_peer, peer, "does not read what is sent to it")

    def _on_writable(self, peer: _Peer) -> None:
        queue = peer.queue
        while queue:
            data = queue[0]
            try:
                sent = peer.sock.send(data)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._end_peer(peer, _cut_off(error))
                return
            self._bytes_out += sent
            peer.queued -= sent
            if sent < len(data):
                queue[0] = memoryview(data)[sent:]
            else:
                queue.popleft()
        self._loop.remove_writer(peer.sock.fileno())
        peer.queue = None
        if peer.is_ending:
            self._shut(peer)

    # ---- ends ------------------------------------------------------------------------------------------------

    def _end_peer(self, peer: _Peer, reason: str) -> None:
        """A connection is over; if it was a node, the JobHost hears that it is lost."""
        if peer.sock.fileno() < 0:
            return
        node, was_ending = peer.node, peer.is_ending
        if node < 0 and not was_ending:
            self._turn_away(peer, reason)
            return
        self._drop(peer)
        if node >= 0 and not was_ending:
            self._lost_count += 1
            self._host.lost(node, reason)

    def _turn_away(self, peer: _Peer, reason: str) -> None:
        """Ends a connection that is no node of this job."""
        if reason:
            self._strange += 1
            self._report(f"closed a connection from {_peer_name(peer) or 'unknown'}: it {reason}")
        self._begin_end(peer, REFUSAL_S)

    def _begin_end(self, peer: _Peer, patience_s: float) -> None:
        """No more is read from it; what was written to it must arrive, so it gets to close first."""
        self._pending.pop(peer, None)
        self._members.pop(peer.node, None)
        self._ending[peer] = None
        peer.is_ending = True
        peer.until_s = self._loop.time() + patience_s
        if peer.queue is None:
            self._shut(peer)
        self._plan_sweep()

    def _shut(self, peer: _Peer) -> None:
        try:
            peer.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._loop.call_soon(self._drop, peer)

    def _drop(self, peer: _Peer) -> None:
        fd = peer.sock.fileno()
        if fd < 0:
            return
        self._pending.pop(peer, None)
        self._members.pop(peer.node, None)
        self._ending.pop(peer, None)
        self._loop.remove_reader(fd)
        if peer.queue is not None:
            self._loop.remove_writer(fd)
        peer.is_ending = True
        peer.sock.close()
        self._check_closed()

    # ---- time ------------------------------------------------------------------------------------------------

    def _plan_sweep(self) -> None:
        if self._sweep_timer is None and not self.is_closed:
            period_s = min(1.0, self._limits.heartbeat_s / 4, self._limits.hello_s / 4, self._limits.goodbye_s / 4)
            self._sweep_due_s = self._loop.time() + period_s
            self._sweep_timer = self._loop.call_later(period_s, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        now_s = self._loop.time()
        slept_s = now_s - self._sweep_due_s
        if slept_s > 1.0:
            # This process itself stood still: what the nodes sent meanwhile is still to be read.
            for peer in self._members.values():
                peer.heard_s += slept_s
        late = [peer for peer in self._pending if now_s > peer.until_s + max(0.0, slept_s)]
        for peer in late:
            self._turn_away(peer, f"did not join within {self._limits.hello_s:g} s")
        for peer in [peer for peer in self._ending if now_s > peer.until_s]:
            self._drop(peer)
        silent_since_s = now_s - self._limits.heartbeat_s
        for peer in [peer for peer in self._members.values() if peer.heard_s < silent_since_s]:
            self._end_peer(peer, f"was silent for {self._limits.heartbeat_s:g} s")
        if self._is_listening and not self._is_accepting:
            self._start_accepting()
        if self._members or self._pending or self._ending:
            self._plan_sweep()

    def _report(self, text: str) -> None:
        """A line about a strange connection; more of them within a while are only counted."""
        now_s = self._loop.time()
        if now_s - self._strange_told_s < _REPORT_S:
            return
        more = self._strange - self._strange_told - 1
        self._strange_told, self._strange_told_s = self._strange, now_s
        self._say(text + (f" (and {more} others before)" if more > 0 else ""))

    # ---- the end of all --------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Ends: nodes that are still members are refused with `reason`; all get time to take the last word."""
        if self._is_closing:
            return
        self._is_closing = True
        self.stop_listening()
        for peer in list(self._pending):
            self._drop(peer)
        for peer in list(self._members.values()):
            self._deliver(peer, Refused(1, reason))
        self._check_closed()

    def _check_closed(self) -> None:
        if self._is_closing and not (self._pending or self._members or self._ending):
            self.is_closed = True
            if self._sweep_timer is not None:
                self._sweep_timer.cancel()
                self._sweep_timer = None


def _peer_name(peer: _Peer) -> str:
    try:
        return plain_address(str(peer.sock.getpeername()[0]))
    except OSError:
        return ""


def _cut_off(error: OSError) -> str:
    return f"was cut off ({(error.strerror or 'unknown error').lower()})"


def _raise_file_limit() -> None:
    """One descriptor for each node; the ranks are started by the guard, which keeps the old limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, MOST_FILES) if hard != resource.RLIM_INFINITY else MOST_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
