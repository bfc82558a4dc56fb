"""Reception of bootrun's orders by the environment service: in turn, or during another order."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bootseer.env.connection import Connection

LOOK_S = 1.0  # between other checks while no order arrives
ALIVE_S = 2.0  # between progress reports


class InterruptedByOrderError(Exception):
    """Another order has arrived, or the connection is closed."""


class Orders:
    """The orders of one connection. A new order interrupts the present one, except that the image is open."""

    def __init__(self, connection: Connection, on_image: Callable[[dict[str, Any]], object]) -> None:
        self._connection, self._on_image = connection, on_image
        self._next: dict[str, Any] | None = None  # an order that arrived during another one
        self._alive_s = 0.0  # time of the last progress report

    def take(self, on_pause: Callable[[], object]) -> dict[str, Any] | None:
        """Return the next order, as `wait`."""
        order, self._next = self._next or self.wait(on_pause), None
        return order

    def wait(self, on_pause: Callable[[], object]) -> dict[str, Any] | None:
        """Wait for an order, and call `on_pause` periodically. None: bootrun has closed the connection."""
        while True:
            try:
                order = self._connection.orders.get(timeout=LOOK_S)
            except queue.Empty:
                on_pause()
                continue
            if not self._is_of_image(order):
                return order

    def check(self, *_: object) -> None:
        """Check for a new order during another one. Raises: InterruptedByOrderError if there is one."""
        if time.monotonic() - self._alive_s > ALIVE_S:
            self._alive_s = time.monotonic()
            self._connection.tell("alive")
        try:
            order = self._connection.orders.get_nowait()
        except queue.Empty:
            return
        if not self._is_of_image(order):
            self._next = order
            raise InterruptedByOrderError

    def _is_of_image(self, order: dict[str, Any] | None) -> bool:
        if order is None or order["do"] != "image":
            return False
        self._on_image(order)
        return True

    def put_back(self, order: dict[str, Any] | None) -> None:
        """Make it the next order."""
        self._next = order

    def is_over(self) -> bool:
        """Return whether bootrun has closed the connection and nothing is left to do."""
        return self._connection.is_gone and self._next is None
