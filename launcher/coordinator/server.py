"""The TCP side of a coordinator: nodes connect, authenticate and join; the JobHost decides everything else.

In: listening sockets and a JobHost. Out: messages to the JobHost, its answers to the nodes, lost nodes. One small
object for each connection, and one timer for all, so that ten thousand nodes are no burden. A client without
authentication gets a kilobyte or two, for a few seconds. Reasons are predicates ("closed the connection").
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from typing import cast

from launcher.base.loop import EventLoop
from launcher.coordinator.host import JobHost
from launcher.coordinator.nodes import Silence
from launcher.rendezvous.acceptor import Acceptor, raise_file_limit
from launcher.rendezvous.endpoint import Listener
from launcher.rendezvous.messages import (
    DroppedFromJob,
    Environment,
    EventBatch,
    Finish,
    FromCoordinator,
    FromMember,
    Join,
    LivenessProbe,
    Ping,
    Pong,
    Refused,
    Resume,
    Resumed,
    WantEnvironment,
    Welcome,
)
from launcher.rendezvous.peer import MAX_QUEUED_BYTES, AcceptedPeer, SharedFrames, cut_off
from launcher.rendezvous.peer_deadlines import LatePeers, Limits, PeerDeadlines
from launcher.rendezvous.readiness import ConnectionPoll
from launcher.rendezvous.rejections import RejectionLog
from launcher.rendezvous.wire import NONCE_BYTES, Broken, Established, Event, Reply, Trouble, Wire

SPARE_FILES = 256  # for all but connections; at most half of the limit
REFUSAL_S = 1.0  # for a rejected client to close
# The actual close of a connection was at most this long before it is noticed: this loop may have been busy, and a
# network may lose a packet.
CLOSED_S = 1.0
_READ_BYTES = 64 * 1024


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
        self._limits = limits or Limits()
        self._peers: dict[int, AcceptedPeer] = {}  # by descriptor; each is in one of the next four as well
        self._pending: dict[AcceptedPeer, None] = {}  # oldest first
        self._members: dict[int, AcceptedPeer] = {}  # by number at the JobHost; also those without a connection
        self._given_up: dict[AcceptedPeer, None] = {}  # dropped by the Job; they learn of it when they read
        self._tokens: dict[str, AcceptedPeer] = {}  # of the members
        self.on_reached: Callable[[str], object] | None = (
            None  # called once, with the address at which others reach this node
        )
        self._run = os.urandom(8).hex()  # identifies this coordinator among those of jobs at the same endpoint
        self._ending: dict[AcceptedPeer, None] = {}
        self._frames = SharedFrames()
        self._is_closing = False
        self.is_closed = False
        self._rejections = RejectionLog(loop, say)
        self._accepted = self._refused = self._ended = self._bytes_in = self._bytes_out = 0
        self._max_files = raise_file_limit()
        self._max_peers = self._max_files - min(SPARE_FILES, self._max_files // 2)
        host.on_listen = self.set_listening
        host.on_finish = self._on_finish
        self._poll = ConnectionPoll(loop, self._on_events, lambda: len(self._members))
        self._deadlines = PeerDeadlines(
            loop,
            self._limits,
            self._peers,
            self._pending,
            self._members,
            self._ending,
            LatePeers(self._on_late_join, self._drop, self._on_quiet),
        )
        self._acceptor = Acceptor(loop, listener, self._has_room, self._accept, self._rejections.report)

    @property
    def port(self) -> int:
        return self._acceptor.port

    @property
    def has_members(self) -> bool:
        """Whether a node has joined, beside this one."""
        return bool(self._members)

    def statistics(self) -> dict[str, int]:
        """Return counters for the bench, the status command and the tests."""
        return {
            "pending": len(self._pending),
            "members": len(self._members),
            "ending": len(self._ending),
            "accepted": self._accepted,
            "refused": self._refused,
            "strange": self._rejections.count,
            "ended": self._ended,
            "bytes_in": self._bytes_in,
            "bytes_out": self._bytes_out,
        }

    # ---- accepting -------------------------------------------------------------------------------------------

    def set_listening(self, on: bool) -> None:
        """Free the port (rank 0 of a static job binds it) or take it again; nodes stay connected."""
        if on and not self._is_closing:
            self._acceptor.resume()
        elif not on:
            self._acceptor.stop()

    def _has_room(self) -> bool:
        is_full = len(self._peers) >= self._max_peers
        if len(self._pending) < self._limits.max_pending and not is_full:
            return True
        if is_full and not self._pending:
            self._rejections.warn_full(self._max_files)
        oldest = next(iter(self._pending), None)
        # A node joins in a few round trips: a client that needs more than a second makes room.
        if oldest is None or oldest.until_s - self._limits.hello_s + 1.0 > self._loop.time():
            return False
        self._turn_away(oldest, "did not join in time while many others wait")
        self._drop(oldest)
        return True

    def _accept(self, sock: socket.socket) -> None:
        self._accepted += 1
        wire = Wire(True, self._secret, self._version, os.urandom(NONCE_BYTES))
        peer = AcceptedPeer(sock, wire, self._loop.time() + self._limits.hello_s, self._deliver)
        fd = sock.fileno()
        self._peers[fd] = peer
        self._pending[peer] = None
        self._poll.add(fd)
        self._deadlines.plan()

    # ---- reading ---------------------------------------------------------------------------------------------

    def _on_events(self, events: list[tuple[int, int]]) -> None:
        for fd, mask in events:
            # Searched at the moment of use: an earlier event may have ended the connection.
            peer = self._peers.get(fd)
            if peer is not None and mask & select.EPOLLOUT:
                self._on_writable(peer)
            if peer is not None and mask & ~select.EPOLLOUT and peer.sock.fileno() == fd:
                self._on_readable(peer)

    def _on_readable(self, peer: AcceptedPeer) -> None:
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
            at_work = self._peers.get(fd)  # another one after a Resume
            if at_work is None:
                return
            self._on_event(at_work, event, received_ns)

    def _on_event(self, peer: AcceptedPeer, event: Event, received_ns: int) -> None:
        if peer.is_given_up:
            if isinstance(event, Broken):
                self._drop(peer)
        elif peer.is_ending:
            # After the end of the job, only the last events of a node count.
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
            self._end_peer(peer, "sent an unrequested Environment")
        elif isinstance(event, EventBatch) and not self._host.wants_events:
            self._end_peer(peer, "sent unrequested events")
        else:
            peer.session.receives(cast(FromMember, event))
            self._host.receive(peer.node, cast(FromMember, event))

    def _on_broken(self, peer: AcceptedPeer, broken: Broken) -> None:
        # A connection that is closed without a byte is a probe of the port, as of load balancers.
        is_probe = broken.trouble is Trouble.CUT and not peer.wire.peer_version
        if peer.node >= 0 and broken.reason.startswith("closed the connection"):
            self._cut_peer(peer, broken.reason)
        else:
            self._end_peer(peer, "" if is_probe and peer.node < 0 else broken.reason)

    def _on_join(self, peer: AcceptedPeer, join: Join) -> None:
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

    def _on_resume(self, peer: AcceptedPeer, resume: Resume) -> None:
        """Resume a node on a new connection, as its old one has broken or was silent for long."""
        if peer.node >= 0:
            self._end_peer(peer, "sent a second Join")
            return
        known = self._tokens.get(resume.token)
        if known is None:
            is_ours = resume.token.startswith(self._run)
            reason = "its connection was lost for too long"
            other = "the job of this node has ended, and another job uses its endpoint"
            self._write(peer, peer.wire.pack(DroppedFromJob(reason) if is_ours else Refused(1, other)))
            self._begin_end(peer, self._limits.goodbye_s)
            return
        del self._pending[peer]
        self._close_socket(known)
        known.take_over(peer)
        self._peers[known.sock.fileno()] = known
        known.session.heard(resume.received)
        self._write(known, known.wire.pack(Resumed(known.session.received)))
        for message in known.session.missing():
            self._write(known, *self._frames.pack(known.wire, cast(FromCoordinator, message)))
        self._host.heard(known.node)

    def _hear_again(self, peer: AcceptedPeer) -> None:
        peer.is_silent = False
        self._host.heard(peer.node)

    # ---- writing ---------------------------------------------------------------------------------------------

    def _deliver(self, peer: AcceptedPeer, message: FromCoordinator) -> None:
        """Send a message; called by the JobHost, which must not be called back."""
        if peer.is_ending or peer.is_given_up:
            return
        if isinstance(message, Welcome):
            message = message._replace(token=peer.token)
        peer.asked = peer.asked or isinstance(message, WantEnvironment)
        peer.session.sends(message)
        if not peer.is_cut:
            self._write(peer, *self._frames.pack(peer.wire, message))
        if peer.session.is_far_behind and not isinstance(message, Finish | Refused | DroppedFromJob):
            self._loop.call_soon(self._end_peer, peer, "has not read its messages for too long")
        if isinstance(message, DroppedFromJob):
            self._set_apart(peer)
        elif isinstance(message, Finish | Refused):
            self._refused += isinstance(message, Refused)
            peer.is_finished = isinstance(message, Finish) and self._host.wants_events
            self._begin_end(peer, self._limits.goodbye_s)

    def _set_apart(self, peer: AcceptedPeer) -> None:
        """Keep only the connection of a dropped node: when it reads, it learns the result of the job."""
        self._members.pop(peer.node, None)
        self._tokens.pop(peer.token, None)
        peer.is_given_up = True
        if peer.is_cut:
            peer.is_ending = True
        else:
            self._given_up[peer] = None

    def _on_finish(self, finish: Finish) -> None:
        """Send the end of the job to dropped nodes, as the job is over."""
        self._acceptor.stop()  # the port is free for the next one
        given_up, self._given_up = self._given_up, {}
        for peer in given_up:
            self._write(peer, *self._frames.pack(peer.wire, finish._replace(failures=(), unsure=(), lost=())))
            self._drop(peer)  # no wait: the message has reached its machine, or is lost

    def _write(self, peer: AcceptedPeer, *chunks: bytes) -> None:
        """Write to a peer; failures are handled later, from the loop."""
        had_queue = peer.queue is not None
        try:
            self._bytes_out += peer.send(*chunks)
        except OSError as error:
            self._loop.call_soon(self._cut_peer, peer, cut_off(error), peer.sock)
            return
        if peer.queue is None or had_queue:
            if peer.queued > MAX_QUEUED_BYTES:
                self._loop.call_soon(self._end_peer, peer, "does not read its messages")
            return
        self._poll.watch_room(peer.sock.fileno(), True)

    def _on_writable(self, peer: AcceptedPeer) -> None:
        try:
            self._bytes_out += peer.flush()
        except OSError as error:
            self._cut_peer(peer, cut_off(error))
            return
        if peer.queue is None:
            self._poll.watch_room(peer.sock.fileno(), False)
            if peer.is_ending:
                self._shut(peer)

    # ---- ends ------------------------------------------------------------------------------------------------

    def _end_peer(self, peer: AcceptedPeer, reason: str) -> None:
        """End a connection; if it was a node, report it to the JobHost as lost."""
        if peer.is_ending or peer.is_given_up:
            self._drop(peer)
        elif peer.node >= 0:
            self._drop(peer)
            self._ended += 1
            self._host.lost(peer.node, reason, peer.heard_s)
        elif not peer.is_cut:
            self._turn_away(peer, reason)

    def _cut_peer(self, peer: AcceptedPeer, reason: str, sock: socket.socket | None = None) -> None:
        """Handle a broken connection (`sock`: this one); the JobHost decides whether to wait for its node."""
        if peer.is_cut or sock not in (None, peer.sock):
            return
        if peer.node < 0 or peer.is_ending or peer.is_given_up:
            self._end_peer(peer, reason)
            return
        self._close_socket(peer)
        self._ended += 1
        peer.is_silent = True
        self._host.unheard(peer.node, Silence.CUT, reason, peer.heard_s, self._limits.heartbeat_s)

    def _close_socket(self, peer: AcceptedPeer) -> None:
        fd = peer.sock.fileno()
        if fd >= 0:
            del self._peers[fd]
            self._poll.remove(fd)
            peer.sock.close()
        peer.queue, peer.queued = None, 0

    def _turn_away(self, peer: AcceptedPeer, reason: str) -> None:
        """End a connection that is no node of this job."""
        if reason:
            self._rejections.add(f"closed a connection from {peer.name()}: it {reason}")
        self._begin_end(peer, REFUSAL_S)

    def _begin_end(self, peer: AcceptedPeer, patience_s: float) -> None:
        """Stop reading from a peer; data written to it must arrive, so it closes first."""
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
        self._deadlines.plan()

    def _shut(self, peer: AcceptedPeer) -> None:
        try:
            peer.sock.shutdown(socket.SHUT_WR)
        except OSError:
            self._loop.call_soon(self._drop, peer)

    def _drop(self, peer: AcceptedPeer) -> None:
        self._pending.pop(peer, None)
        self._members.pop(peer.node, None)
        self._tokens.pop(peer.token, None)
        self._given_up.pop(peer, None)
        self._ending.pop(peer, None)
        peer.is_ending = True
        self._close_socket(peer)
        self._check_closed()

    # ---- time ------------------------------------------------------------------------------------------------

    def _on_late_join(self, peer: AcceptedPeer) -> None:
        self._turn_away(peer, f"did not join within {self._limits.hello_s:g} s")

    def _on_quiet(self, peer: AcceptedPeer, is_over: bool) -> None:
        """Handle a node that is silent for half of the limit, or, with `is_over`, beyond the limit."""
        limit_s = self._limits.heartbeat_s
        takes_all = peer.takes_all()
        if is_over:
            peer.is_silent = True
            how = Silence.STALLED if takes_all else Silence.MUTE
            self._host.unheard(peer.node, how, f"was silent for {limit_s:g} s", peer.heard_s, limit_s)
        if takes_all and not peer.is_ending and not peer.is_given_up:
            self._write(peer, peer.wire.pack(LivenessProbe()))  # its arrival shows that its machine lives

    # ---- the end of all --------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """End: refuse remaining members with `reason`; all nodes get time to read their last message."""
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
        self._deadlines.close()
        self._poll.close()
