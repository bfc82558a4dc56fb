"""The coordinator's list of nodes that serve bytes to others, and its distribution to the nodes.

In: PeerServes of nodes, nodes that have left. Out: PeerNodes for each serving node, with its own group alone; so a
job of thousands of nodes costs each of them only some kilobytes. A node keeps its group as others join and leave.
Changes in quick succession make one message.
"""

from __future__ import annotations

from collections.abc import Callable

from launcher.base.listen_address import is_ip
from launcher.base.loop import Cancellable, EventLoop
from launcher.rendezvous.messages import PeerNode, PeerNodes, PeerServes

GROUP_NODES = 64  # as many as fetch one copy together (bootseer.peers.spans.MAX_GROUP)
SEND_AFTER_S = 0.02

Deliver = Callable[[int, PeerNodes], object]


class ServingNodes:
    """See the module's docstring."""

    def __init__(self, loop: EventLoop, deliver: Deliver) -> None:
        """Args: deliver: sends a message to a node, by its number."""
        self._loop = loop
        self._deliver = deliver
        self._groups: dict[int, dict[int, PeerNode]] = {}  # by group, then by node
        self._changed: set[int] = set()  # groups
        self._timer: Cancellable | None = None

    def receive(self, node: int, message: PeerServes) -> None:
        """Take a node's announcement; a node without a reachable address does not serve."""
        if not message.port or not is_ip(message.address):
            self.left(node)
            return
        found = PeerNode(f"{message.host}.{node}", message.address, message.port)
        group = self._groups.setdefault(node // GROUP_NODES, {})
        if group.get(node) != found:
            group[node] = found
            self._note(node // GROUP_NODES)

    def left(self, node: int) -> None:
        """Remove a node that serves no longer, or has left."""
        if self._groups.get(node // GROUP_NODES, {}).pop(node, None) is not None:
            self._note(node // GROUP_NODES)

    def _note(self, group: int) -> None:
        self._changed.add(group)
        if self._timer is None:
            self._timer = self._loop.call_later(SEND_AFTER_S, self._tell)

    def _tell(self) -> None:
        self._timer = None
        changed, self._changed = self._changed, set()
        for number in sorted(changed):
            nodes = self._groups.get(number, {})
            all_of_it = tuple(nodes[node] for node in sorted(nodes))
            for node in sorted(nodes):
                self._deliver(node, PeerNodes(nodes[node].id, all_of_it))
