"""Who may send to a DataNode now: few at once, so that they end one after the other.

Parts that are all sent at the same time end at the same time too, and then all wait for their acknowledgements (up
to 0.4 s a part in HDFS) while nothing is sent. Here whoever has sent everything makes room for the next one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

SENDERS = 2  # to one DataNode; its streams hold each other up


class Turns:
    """Of one store's writers."""

    def __init__(self, senders: int = SENDERS) -> None:
        self._senders = senders
        self._gates: dict[str, tuple[asyncio.Semaphore, int]] = {}  # by node; how many use it

    @asynccontextmanager
    async def take(self, node: str) -> AsyncIterator[Callable[[], None]]:
        """Waits for a turn, which lasts until the block ends or what it gives is called, from any thread.

        Without a node (the NameNode chooses) there are no turns.
        """
        if not node:
            yield lambda: None
            return
        gate, users = self._gates.get(node, (asyncio.Semaphore(self._senders), 0))
        self._gates[node] = gate, users + 1
        loop = asyncio.get_running_loop()
        is_held = False

        def end() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                gate.release()

        def end_soon() -> None:
            try:
                loop.call_soon_threadsafe(end)
            except RuntimeError:
                pass  # the loop is closed: a call that was given up long ago

        try:
            await gate.acquire()
            is_held = True
            yield end_soon
        finally:
            end()
            users = self._gates[node][1] - 1
            if users:
                self._gates[node] = gate, users
            else:
                del self._gates[node]
