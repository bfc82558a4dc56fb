"""The deadlines of a coordinator's connections: to join, to close, and to send heartbeats. One timer serves all.

In: live views of the connections by stage. Out: late connections, by callback. If this process itself was
suspended, messages that the nodes sent meanwhile are still unread, so all deadlines move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from typing import NamedTuple

from launcher.base.loop import Cancellable, EventLoop
from launcher.rendezvous.peer import AcceptedPeer

SUSPENDED_S = 1.0  # this process itself was suspended if it is later than that


class Limits(NamedTuple):
    """Times and number of the connections."""

    heartbeat_s: float = 15.0  # silence after which a node is lost
    hello_s: float = 5.0  # from accept to Join
    goodbye_s: float = 5.0  # for a node to close after the last message to it
    max_pending: int = 16 * 1024  # connections that have not joined yet


class LatePeers(NamedTuple):
    """The handlers of late connections."""

    join: Callable[[AcceptedPeer], object]  # it did not join in time
    close: Callable[[AcceptedPeer], object]  # it did not close in time
    heartbeat: Callable[[AcceptedPeer, bool], object]  # silent for half of the limit; true: beyond the limit


class PeerDeadlines:
    """Looks at all connections at a period, from `plan` on, as long as there are any."""

    def __init__(
        self,
        loop: EventLoop,
        limits: Limits,
        connected: Sized,
        pending: Iterable[AcceptedPeer],
        members: Mapping[int, AcceptedPeer],
        ending: Iterable[AcceptedPeer],
        late: LatePeers,
    ) -> None:
        """Args: connected: all connections; pending: those that have not joined; members: nodes, also without a
        connection; ending: connections that must close."""
        self._loop = loop
        self._limits = limits
        self._connected, self._pending, self._members, self._ending = connected, pending, members, ending
        self._late = late
        self._period_s = min(4.0, limits.heartbeat_s, limits.hello_s, limits.goodbye_s) / 4
        self._timer: Cancellable | None = None
        self._due_s = 0.0
        self._is_closed = False

    def plan(self) -> None:
        """Look at the connections after a period."""
        if self._timer is None and not self._is_closed:
            self._due_s = self._loop.time() + self._period_s
            self._timer = self._loop.call_later(self._period_s, self._look)

    def _look(self) -> None:
        self._timer = None
        now_s = self._loop.time()
        stood_s = now_s - self._due_s
        if stood_s > SUSPENDED_S:
            for peer in self._members.values():
                peer.heard_s += stood_s
        for peer in [peer for peer in self._pending if now_s > peer.until_s]:
            if stood_s > SUSPENDED_S or peer.has_unread():
                peer.until_s = now_s + 1.0  # this process is late, not they
            else:
                self._late.join(peer)
        for peer in [peer for peer in self._ending if now_s > peer.until_s]:
            self._late.close(peer)
        limit_s = self._limits.heartbeat_s
        quiet_since_s = now_s - limit_s / 2
        for peer in [peer for peer in self._members.values() if peer.heard_s < quiet_since_s]:
            if not peer.is_cut and not peer.has_unread():
                self._late.heartbeat(peer, now_s - peer.heard_s >= limit_s)
        if self._connected or self._members:
            self.plan()

    def close(self) -> None:
        """End; may be called from a handler."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
