"""The connection of the environment service to bootrun: JSON lines of orders and answers (main.py)."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

from bootseer.ipc.channel import Channel

MAX_LINE_BYTES = 16 << 20


class Connection:
    """The service's end: a thread receives orders into a queue, and any thread can send answers."""

    def __init__(self) -> None:
        """Use standard input."""
        self._channel = Channel.of_standard_input(max_bytes=MAX_LINE_BYTES)
        # None: bootrun has closed the connection
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.is_gone = False

    def first(self) -> dict[str, Any] | None:
        """Return the first order; call it before `listen`. None: bootrun has closed the connection."""
        return self._channel.receive()

    def listen(self, on_gone: Callable[[], object]) -> None:
        """Start the receiving thread, which calls `on_gone` when bootrun closes the connection."""
        threading.Thread(target=self._listen, args=(on_gone,), name="orders", daemon=True).start()

    def tell(self, did: str, **fields: object) -> None:
        """Send an answer; a closed connection is ignored."""
        self._channel.send({"did": did, **fields})

    def _listen(self, on_gone: Callable[[], object]) -> None:
        while (order := self._channel.receive()) is not None:
            self.orders.put(order)
        self.is_gone = True
        self.orders.put(None)
        on_gone()


def end_at_once() -> None:
    """Exit immediately: the next process completes or undoes unfinished work, and set-up commands end as well."""
    sys.stderr.flush()
    os._exit(0)
