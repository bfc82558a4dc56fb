"""The TCP side of a coordinator: nodes connect, prove themselves, join; the JobHost decides everything else.

In: listening sockets and a JobHost. Out: messages to the JobHost, its answers to the nodes, nodes found lost. One
small object for each connection, one timer for all and an epoll of its own, so that ten thousand nodes are no
burden. Nobody who has not proven itself gets more than a kilobyte or two and a few seconds. Reasons are predicates
of a node ("closed the connection").
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import NamedTuple, cast

from launcher.job import Silence
from launcher.loop import Cancellable, EventLoop
from launcher.rendezvous import codec
from launcher.rendezvous.acceptor import Acceptor, raise_file_limit
from launcher.rendezvous.endpoint import Listener
from launcher.rendezvous.host import JobHost
from launcher.rendezvous.messages import (
    Environment,
    EventBatch,
    Finish,
    FromCoordinator,
    FromMember,
    GaveUp,
    Join,
    Nudge,
    Ping,
    Pong,
    Refused,
    Resume,
    Resumed,
    WantEnvironment,
    Welcome,
)
from launcher.rendezvous.peer import MOST_QUEUED_BYTES, Peer, cut_off
from launcher.rendezvous.wire import NONCE_BYTES, Broken, Established, Event, Reply, Trouble, Wire

SPARE_FILES = 256
REFUSAL_S = 1.0  # for who was turned away to close
# A connection that is closed was so, at most, that long before it is seen: this loop may have been busy, and a
# network lose a packet.
CLOSED_S = 1.0
_READ_BYTES = 64 * 1024
_SHARE_BYTES = 2048  # from this size on, a payload for many nodes is queued by reference
_REPORT_S = 10.0  # one line about strange connections in this time
_EVENTS = 1024  # of one turn
# With many nodes a heartbeat comes every fraction of a millisecond, and to wake up for each costs more than its
# answer: from this number on, events are looked for at this period. The clocks' bound is so much worse.
_MANY = 512
_FEW = 256
_PERIOD_S = 0.005


class Limits(NamedTuple):
    """Times and number of the connections."""

    heartbeat_s: float = 15.0  # silence that makes a node lost
    hello_s: float = 5.0  # from accept to Join
    goodbye_s: float = 5.0  # for a node to close after the last word to it
    most_pending: int = 16 * 1024  # connections that have not joined yet


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
        self._secret = secret
        self._version = version
        self._say = say
        self._limits = limits or Limits()
        self._epoll = select.epoll()
        self._peers: dict[int, Peer] = {}  # by descriptor; each is in one of the next four as well
        self._pending: dict[Peer, None] = {}  # oldest first
        self._members: dict[int, Peer] = {}  # by number at the JobHost; also those without a connection
        self._given_up: dict[Peer, None] = {}  # by the Job; they learn of it when they read
        self._tokens: dict[str, Peer] = {}  # of the members
        self.on_reached: Callable[[str], object] | None = (
            None  # told, once, at which address others reach this node
        )
        self._run = os.urandom(8).hex()  # tells this coordinator from the one of another job at the same place
        self._ending: dict[Peer, None] = {}
        self._last_encoded: tuple[FromCoordinator | None, tuple[int, bytes]] = (None, (0, b""))
        self._sweep_timer: Cancellable | None = None
        self._sweep_due_s = 0.0
        self._period_timer: Cancellable | None = None
        self._is_closing = False
        self.is_closed = False
        self._strange_told, self._strange_told_s = 0, -_REPORT_S
        self._accepted = self._refused = self._strange = self._ended = self._bytes_in = self._bytes_out = 0
        self._most_files = raise_file_limit()
        host.on_listen = self.set_listening
        host.on_finish = self._on_finish
        loop.add_reader(self._epoll.fileno(), self._on_events)
        self._acceptor = Acceptor(loop, listener, self._has_room, self._accept, self._report)

    @property
    def port(self) -> int:
        return self._acceptor.port

    @property
    def has_members(self) -> bool:
        """Whether a node has come, beside this one."""
        return bool(self._members)

    def statistics(self) -> dict[str, int]:
        """Counters for the bench, the status command and the tests."""
        return {
            "pending": len(self._pending),
            "members": len(self._members),
            "ending": len(self._ending),
            "accepted": self._accepted,
            "refused": self._refused,
            "strange": self._strange,
            "ended": self._ended,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
        }

    # ---- accepting -------------------------------------------------------------------------------------------

    def set_listening(self, on: bool) -> None:
        """Frees the port (rank 0 of a static job binds it) or takes it again; nodes stay connected."""
        if on and not self._is_closing:
            self._acceptor.resume()
        elif not on:
            self._acceptor.stop()

    def stop_listening(self) -> None:
        """See set_listening."""
        self.set_listening(False)

    def resume_listening(self) -> None:
        """See set_listening."""
        self.set_listening(True)

    def _has_room(self) -> bool:
        if len(self._pending) < self._limits.most_pending and len(self._peers) < self._most_files - SPARE_FILES:
            return True
        oldest = next(iter(self._pending), None)
        # A node is done in a few round trips: who has been at it for a second makes room.
        if oldest is None or oldest.until_s - self._limits.hello_s + 1.0 > self._loop.time():
            return False
        self._turn_away(oldest, "did not join in time while many others wait")
        self._drop(oldest)
        return True

    def _accept(self, sock: socket.socket) -> None:
        self._accepted += 1
        wire = Wire(True, self._secret, self._version, os.urandom(NONCE_BYTES))
        peer = Peer(sock, wire, self._loop.time() + self._limits.hello_s, self._deliver)
        fd = sock.fileno()
        self._peers[fd] = peer
        self._pending[peer] = None
        self._epoll.register(fd, select.EPOLLIN)
        self._plan_sweep()

    # ---- reading ---------------------------------------------------------------------------------------------

    def _on_events(self) -> int:
        events = self._epoll.poll(0, _EVENTS)
        for fd, mask in events:
            # Looked up at the moment of use: an earlier event may have ended the connection.
            peer = self._peers.get(fd)
            if peer is not None and mask & select.EPOLLOUT:
                self._on_writable(peer)
            if peer is not None and mask & ~select.EPOLLOUT and peer.sock.fileno() == fd:
                self._on_readable(peer)
        if self.is_closed:
            return 0
        if self._period_timer is None and len(self._members) >= _MANY:
            # A watch that comes and goes is no way: each time the kernel would walk through all connections.
            self._loop.remove_reader(self._epoll.fileno())
            self._period_timer = self._loop.call_later(_PERIOD_S, self._on_period)
        return len(events)

    def _on_period(self) -> None:
        was_full = self._on_events() == _EVENTS
        if self.is_closed:
            return
        if len(self._members) < _FEW:
            self._period_timer = None
            self._loop.add_reader(self._epoll.fileno(), self._on_events)
        else:
            self._period_timer = self._loop.call_later(0.0 if was_full else _PERIOD_S, self._on_period)

    def _on_readable(self, peer: Peer) -> None:
        received_ns = time.monotonic_ns()
        try:
            data = peer.sock.recv(_READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._cut_peer(peer, cut_off(error))
            return
        if peer.is_ending:
            if not data:
                self._drop(peer)
            if not (data and peer.is_finished):
                return
        self._bytes_in += len(data)
        peer.heard_s = received_ns / 1e9 if data else max(peer.heard_s, received_ns / 1e9 - CLOSED_S)
        if peer.is_silent and data:
            self._hear_again(peer)
        fd = peer.sock.fileno()
        for event in peer.wire.receive(data) if data else peer.wire.end():
            at_work = self._peers.get(fd)  # another one from a Resume on
            if at_work is None:
                return
            self._on_event(at_work, event, received_ns)

    def _on_event(self, peer: Peer, event: Event, received_ns: int) -> None:
        if peer.is_given_up:
            if isinstance(event, Broken):
                self._drop(peer)
        elif peer.is_ending:
            # Of a node that was told the end of the job, its last events count and nothing else.
            if peer.is_finished and isinstance(event, EventBatch):
                self._host.receive(peer.node, event)
        elif isinstance(event, Ping) and peer.node >= 0:
            peer.session.heard(event.received)
            pong = Pong(event.local_ns, received_ns, time.monotonic_ns(), peer.session.received)
            self._write(peer, peer.wire.pack(pong))
        elif isinstance(event, Reply):
            self._write(peer, event.data)
        elif isinstance(event, Established):
            pass
        elif isinstance(event, Broken):
            self._on_broken(peer, event)
        elif isinstance(event, Join):
            self._on_join(peer, event)
        elif isinstance(event, Resume):
            self._on_resume(peer, event)
        elif peer.node < 0:
            self._end_peer(peer, "sent a message before its Join")
        elif isinstance(event, Environment) and not peer.asked:
            self._end_peer(peer, "sent an Environment that nobody asked for")
        elif isinstance(event, EventBatch) and not self._host.wants_events:
            self._end_peer(peer, "sent events that nobody asked for")
        else:
            peer.session.receives(cast(FromMember, event))
            self._host.receive(peer.node, cast(FromMember, event))

    def _on_broken(self, peer: Peer, broken: Broken) -> None:
        # A connection that is closed without a byte is a probe of the port, as load balancers do it.
        is_probe = broken.trouble is Trouble.CUT and not peer.wire.peer_version
        if peer.node >= 0 and broken.reason.startswith("closed the connection"):
            self._cut_peer(peer, broken.reason)
        else:
            self._end_peer(peer, "" if is_probe and peer.node < 0 else broken.reason)

    def _on_join(self, peer: Peer, join: Join) -> None:
        if peer.node >= 0:
            self._end_peer(peer, "sent a second Join")
            return
        if not join.address:
            join = join._replace(address=peer.name())
        if self.on_reached is not None and (own := peer.own_name()):
            self.on_reached(own)
            self.on_reached = None
        del self._pending[peer]
        peer.node = self._host.attach(peer.deliver)
        peer.token = self._run + os.urandom(8).hex()
        self._tokens[peer.token] = self._members[peer.node] = peer
        self._host.receive(peer.node, join)

    def _on_resume(self, peer: Peer, resume: Resume) -> None:
        """A node whose connection has broken, or has heard nothing for long, is here with a new one."""
        if peer.node >= 0:
            self._end_peer(peer, "sent a second Join")
            return
        known = self._tokens.get(resume.token)
        if known is None:
            is_ours = resume.token.startswith(self._run)
            reason = "its connection was gone for too long"
            other = "the job of this node has ended, another one is at its place by now"
            self._write(peer, peer.wire.pack(GaveUp(reason) if is_ours else Refused(1, other)))
            self._begin_end(peer, self._limits.goodbye_s)
            return
        del self._pending[peer]
        self._close_socket(known)
        known.take_over(peer)
        self._peers[known.sock.fileno()] = known
        known.session.heard(resume.received)
        self._write(known, known.wire.pack(Resumed(known.session.received)))
        for message in known.session.missing():
            self._write(known, *self._frame(known, cast(FromCoordinator, message)))
        self._host.heard(known.node)

    def _hear_again(self, peer: Peer) -> None:
        peer.is_silent = False
        self._host.heard(peer.node)

    # ---- writing ---------------------------------------------------------------------------------------------

    def _deliver(self, peer: Peer, message: FromCoordinator) -> None:
        """Called by the JobHost; must not call it back."""
        if peer.is_ending or peer.is_given_up:
            return
        if isinstance(message, Welcome):
            message = message._replace(token=peer.token)
        peer.asked = peer.asked or isinstance(message, WantEnvironment)
        peer.session.sends(message)
        if not peer.is_cut:
            self._write(peer, *self._frame(peer, message))
        if peer.session.is_far_behind and not isinstance(message, Finish | Refused | GaveUp):
            self._loop.call_soon(self._end_peer, peer, "has not read for too long what was sent to it")
        if isinstance(message, GaveUp):
            self._set_apart(peer)
        elif isinstance(message, Finish | Refused):
            self._refused += isinstance(message, Refused)
            peer.is_finished = isinstance(message, Finish) and self._host.wants_events
            self._begin_end(peer, self._limits.goodbye_s)

    def _set_apart(self, peer: Peer) -> None:
        """Of a node that was given up, the connection stays: when it reads, it learns what became of the job."""
        self._members.pop(peer.node, None)
        self._tokens.pop(peer.token, None)
        peer.is_given_up = True
        if peer.is_cut:
            peer.is_ending = True
        else:
            self._given_up[peer] = None

    def _on_finish(self, finish: Finish) -> None:
        """The job is over."""
        self._acceptor.stop()  # the port is free for the next one
        given_up, self._given_up = self._given_up, {}
        for peer in given_up:
            self._write(peer, *self._frame(peer, finish._replace(failures=(), unsure=(), lost=())))
            self._drop(peer)  # nobody waits for it; what was sent is with its machine, or lost

    def _frame(self, peer: Peer, message: FromCoordinator) -> tuple[bytes, ...]:
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

    def _write(self, peer: Peer, *chunks: bytes) -> None:
        """Failures are dealt with later, from the loop."""
        had_queue = peer.queue is not None
        try:
            self._bytes_out += peer.send(*chunks)
        except OSError as error:
            self._loop.call_soon(self._cut_peer, peer, cut_off(error), peer.sock)
            return
        if peer.queue is None or had_queue:
            if peer.queued > MOST_QUEUED_BYTES:
                self._loop.call_soon(self._end_peer, peer, "does not read what is sent to it")
            return
        self._epoll.modify(peer.sock.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _on_writable(self, peer: Peer) -> None:
        try:
            self._bytes_out += peer.flush()
        except OSError as error:
            self._cut_peer(peer, cut_off(error))
            return
        if peer.queue is None:
            self._epoll.modify(peer.sock.fileno(), select.EPOLLIN)
            if peer.is_ending:
                self._shut(peer)

    # ---- ends ------------------------------------------------------------------------------------------------

    def _end_peer(self, peer: Peer, reason: str) -> None:
        """A connection is over; if it was a node, the JobHost hears that it is lost."""
        if peer.is_ending or peer.is_given_up:
            self._drop(peer)
        elif peer.node >= 0:
            self._drop(peer)
            self._ended += 1
            self._host.lost(peer.node, reason, peer.heard_s)
        elif not peer.is_cut:
            self._turn_away(peer, reason)

    def _cut_peer(self, peer: Peer, reason: str, sock: socket.socket | None = None) -> None:
        """A connection has broken (`sock`: this one); the JobHost decides whether its node is waited for."""
        if peer.is_cut or sock not in (None, peer.sock):
            return
        if peer.node < 0 or peer.is_ending or peer.is_given_up:
            self._end_peer(peer, reason)
            return
        self._close_socket(peer)
        self._ended += 1
        peer.is_silent = True
        self._host.unheard(peer.node, Silence.CUT, reason, peer.heard_s, self._limits.heartbeat_s)

    def _close_socket(self, peer: Peer) -> None:
        fd = peer.sock.fileno()
        if fd >= 0:
            del self._peers[fd]
            self._epoll.unregister(fd)
            peer.sock.close()
        peer.queue, peer.queued = None, 0

    def _turn_away(self, peer: Peer, reason: str) -> None:
        """Ends a connection that is no node of this job."""
        if reason:
            self._strange += 1
            self._report(f"closed a connection from {peer.name()}: it {reason}")
        self._begin_end(peer, REFUSAL_S)

    def _begin_end(self, peer: Peer, patience_s: float) -> None:
        """No more is read from it; what was written to it must arrive, so it gets to close first."""
        self._pending.pop(peer, None)
        self._members.pop(peer.node, None)
        self._tokens.pop(peer.token, None)
        peer.is_ending = True
        if peer.is_cut or peer.is_silent:
            self._drop(peer)
            return
        self._ending[peer] = None
        peer.until_s = self._loop.time() + patience_s
        if peer.queue is None:
            self._shut(peer)
        self._plan_sweep()

    def _shut(self, peer: Peer) -> None:
        try:
            peer.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._loop.call_soon(self._drop, peer)

    def _drop(self, peer: Peer) -> None:
        self._pending.pop(peer, None)
        self._members.pop(peer.node, None)
        self._tokens.pop(peer.token, None)
        self._given_up.pop(peer, None)
        self._ending.pop(peer, None)
        peer.is_ending = True
        self._close_socket(peer)
        self._check_closed()

    # ---- time ------------------------------------------------------------------------------------------------

    def _plan_sweep(self) -> None:
        if self._sweep_timer is None and not self.is_closed:
            limits = self._limits
            period_s = min(4.0, limits.heartbeat_s, limits.hello_s, limits.goodbye_s) / 4
            self._sweep_due_s = self._loop.time() + period_s
            self._sweep_timer = self._loop.call_later(period_s, self._sweep)

    def _sweep(self) -> None:
        self._sweep_timer = None
        now_s = self._loop.time()
        stood_s = now_s - self._sweep_due_s
        if stood_s > 1.0:
            # This process itself stood still: what the nodes sent meanwhile is still to be read.
            for peer in self._members.values():
                peer.heard_s += stood_s
        for peer in [peer for peer in self._pending if now_s > peer.until_s]:
            if stood_s > 1.0 or peer.has_unread():
                peer.until_s = now_s + 1.0  # we are behind, not they
            else:
                self._turn_away(peer, f"did not join within {self._limits.hello_s:g} s")
        for peer in [peer for peer in self._ending if now_s > peer.until_s]:
            self._drop(peer)
        limit_s = self._limits.heartbeat_s
        quiet_since_s = now_s - limit_s / 2
        for peer in [peer for peer in self._members.values() if peer.heard_s < quiet_since_s]:
            if not peer.is_cut and not peer.has_unread():
                self._look_at_silent(peer, now_s - peer.heard_s >= limit_s)
        if self._peers or self._members:
            self._plan_sweep()

    def _look_at_silent(self, peer: Peer, is_over: bool) -> None:
        """Of a node that says nothing for half of what is allowed, or, with `is_over`, for longer than that."""
        limit_s = self._limits.heartbeat_s
        takes_all = peer.takes_all()
        if is_over:
            peer.is_silent = True
            how = Silence.STALLED if takes_all else Silence.MUTE
            self._host.unheard(peer.node, how, f"was silent for {limit_s:g} s", peer.heard_s, limit_s)
        if takes_all and not peer.is_ending and not peer.is_given_up:
            self._write(peer, peer.wire.pack(Nudge()))  # that it arrives shows that its machine lives

    def _report(self, text: str) -> None:
        """A line about a strange connection; more of them within a while are only counted."""
        now_s = self._loop.time()
        if now_s - self._strange_told_s < _REPORT_S:
            return
        more = self._strange - self._strange_told - 1
        self._strange_told, self._strange_told_s = self._strange, now_s
        self._say(text + (f" (and {more} before)" if more > 0 else ""))

    # ---- the end of all --------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Ends: nodes that are still members are refused with `reason`; all get time to take the last word."""
        if self._is_closing:
            return
        self._is_closing = True
        self._acceptor.stop()
        for peer in list(self._pending):
            self._drop(peer)
        for peer in list(self._members.values()):
            self._deliver(peer, Refused(1, reason))
        for peer in list(self._given_up):
            self._drop(peer)
        self._check_closed()

    def _check_closed(self) -> None:
        if not self._is_closing or self._peers or self.is_closed:
            return
        self.is_closed = True
        for timer in (self._sweep_timer, self._period_timer):
            if timer is not None:
                timer.cancel()
        if self._period_timer is None:
            self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
