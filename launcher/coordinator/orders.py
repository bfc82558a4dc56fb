"""PURE: the orders of a job's coordinator to its host: messages to nodes, and the use of the endpoint's port."""

from __future__ import annotations

from bootseer.light_typing import Iterable, NamedTuple
from launcher.rendezvous import messages


class Send(NamedTuple):
    """Order: send this message to that node."""

    node: int
    message: messages.FromCoordinator


class Listen(NamedTuple):
    """Order: free the endpoint's port for rank 0, or take it again."""

    on: bool


Order = Send | Listen


class Outbox:
    """The orders that the host has not taken yet, oldest first."""

    def __init__(self, nodes: Iterable[int]) -> None:
        """Args: nodes: a live view of the numbers of the job's nodes."""
        self._nodes = nodes
        self._orders: list[Order] = []

    def send(self, node: int, message: messages.FromCoordinator) -> None:
        """Order a message to a node, which need not be in the job."""
        self._orders.append(Send(node, message))

    def send_to_all(self, message: messages.FromCoordinator) -> None:
        """Order a message to all nodes of the job."""
        for node in self._nodes:
            self._orders.append(Send(node, message))

    def log_to_all(self, text: str) -> None:
        """Order a log line on all nodes of the job."""
        self.send_to_all(messages.Note(text))

    def listen(self, on: bool) -> None:
        """Order to take the endpoint's port, or to free it."""
        self._orders.append(Listen(on))

    def take(self) -> list[Order]:
        orders, self._orders = self._orders, []
        return orders
