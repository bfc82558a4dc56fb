"""The orders of bootrun as the keeper of an environment takes them: in turn, or in the middle of another one."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bootseer.env.setup_keeper import Connection

LOOK_S = 1.0  # between looks at other things while no order comes
ALIVE_S = 2.0  # between words that say it gets on


class AbandonedError(Exception):
    """Another order has come, or nobody is there any more."""


class Orders:
    """Of one connection. An order that ends another one is the next; that the image is open ends none."""

    def __init__(self, connection: Connection, on_image: Callable[[dict[str, Any]], object]) -> None:
        self._connection, self._on_image = connection, on_image
        self._next: dict[str, Any] | None = None  # an order that came while another was carried out
        self._alive_s = 0.0  # when it was said last

    def take(self, on_pause: Callable[[], object]) -> dict[str, Any] | None:
        """The next one, as `wait`."""
        order, self._next = self._next or self.wait(on_pause), None
        return order

    def wait(self, on_pause: Callable[[], object]) -> dict[str, Any] | None:
        """One that comes now; meanwhile `on_pause` is called again and again. None: bootrun has gone."""
        while True:
            try:
                order = self._connection.orders.get(timeout=LOOK_S)
            except queue.Empty:
                on_pause()
                continue
            if not self._is_of_image(order):
                return order

    def check(self, *_: object) -> None:
        """In the middle of something. Raises: AbandonedError when there is another order."""
        if time.monotonic() - self._alive_s > ALIVE_S:
            self._alive_s = time.monotonic()
            self._connection.tell("alive")
        try:
            order = self._connection.orders.get_nowait()
        except queue.Empty:
            return
        if not self._is_of_image(order):
            self._next = order
            raise AbandonedError

    def _is_of_image(self, order: dict[str, Any] | None) -> bool:
        if order is None or order["do"] != "image":
            return False
        self._on_image(order)
        return True

    def put_back(self, order: dict[str, Any] | None) -> None:
        """It is the next."""
        self._next = order

    def is_over(self) -> bool:
        """Bootrun has gone, and there is nothing left to do for it."""
        return self._connection.is_gone and self._next is None
