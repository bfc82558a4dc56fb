"""The coordinator in this process, and the link of its own node to it.

In: a listening socket and this node's Join. Out: a Link. Separate from agent/member.py, which decides when a node
hosts.
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.base.loop import EventLoop
from launcher.coordinator.host import JobHost, LocalLink
from launcher.coordinator.server import Coordinator
from launcher.rendezvous.endpoint import Listener
from launcher.rendezvous.messages import FromCoordinator, Join
from launcher.rendezvous.peer_deadlines import Limits


class HostedCoordinator:
    """The coordinator of a job of several nodes, and the link to it."""

    def __init__(
        self,
        loop: EventLoop,
        host: JobHost,
        listener: Listener,
        secret: bytes | None,
        version: str,
        heartbeat_s: float,
        on_message: Callable[[FromCoordinator], object],
        say: Callable[[str], object],
    ) -> None:
        """Args: heartbeat_s: the silence after which a node is lost."""
        self.coordinator = Coordinator(loop, host, listener, secret, version, say, Limits(heartbeat_s=heartbeat_s))
        self.link = LocalLink(loop, host, on_message)

    def join(self, join: Join, own: str, on_reached: Callable[[str], object] | None) -> None:
        """Send this node's Join.

        Args: own: its address, if the Join has none; on_reached: gets the address at which others reach it. It is
        None if that is known.
        """
        self.link.send(join._replace(address=join.address or own))
        if on_reached is None:
            return

        def reached(address: str) -> None:
            on_reached(address)
            if not join.address:
                self.link.reached(address)

        self.coordinator.on_reached = reached

    @property
    def has_others(self) -> bool:
        """Whether another node has joined."""
        return self.coordinator.has_members

    @property
    def is_closed(self) -> bool:
        """After `close`: whether all nodes have got their last message."""
        return self.coordinator.is_closed

    def close(self, reason: str) -> None:
        """End the coordinator; other nodes are refused with `reason`."""
        self.coordinator.close(reason)
        self.link.close()
