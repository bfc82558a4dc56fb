"""The readiness of a coordinator's connections: a separate epoll, so that ten thousand of them are no burden.

In: descriptors. Out: their events, in batches. Few events are handled at once; with many nodes a heartbeat arrives
every fraction of a millisecond, and a wake-up for each costs more than its answer, so they are polled.
"""

from __future__ import annotations

import select
from collections.abc import Callable

from launcher.base.loop import Cancellable, EventLoop

_EVENTS = 1024  # of one iteration
# From this number of nodes on, events are polled at this period; the clocks' bound grows by as much.
_MANY = 512
_FEW = 256
_PERIOD_S = 0.005


class ConnectionPoll:
    """Calls back with the events of its descriptors, until it is closed."""

    def __init__(
        self,
        loop: EventLoop,
        on_events: Callable[[list[tuple[int, int]]], object],
        count_nodes: Callable[[], int],
    ) -> None:
        """Args: on_events: gets descriptors with their events; a descriptor may be removed meanwhile. count_nodes:
        returns how many nodes send heartbeats."""
        self._loop = loop
        self._on_events = on_events
        self._count_nodes = count_nodes
        self._epoll = select.epoll()
        self._timer: Cancellable | None = None  # while events are polled
        self._is_closed = False
        loop.add_reader(self.fileno(), self.poll)

    def fileno(self) -> int:
        """Return the descriptor that the loop watches."""
        return self._epoll.fileno()

    def add(self, fd: int) -> None:
        """Watch a descriptor for data to read."""
        self._epoll.register(fd, select.EPOLLIN)

    def watch_room(self, fd: int, on: bool) -> None:
        """Watch a descriptor also for room to write, or only for data again."""
        self._epoll.modify(fd, select.EPOLLIN | select.EPOLLOUT if on else select.EPOLLIN)

    def remove(self, fd: int) -> None:
        """Watch a descriptor no longer."""
        self._epoll.unregister(fd)

    def poll(self) -> int:
        """Handle the present events, and return how many there were."""
        events = self._epoll.poll(0, _EVENTS)
        self._on_events(events)
        if self._is_closed:
            return 0
        if self._timer is None and self._count_nodes() >= _MANY:
            # Adding and removing the watch is too slow: each time the kernel would walk through all connections.
            self._loop.remove_reader(self.fileno())
            self._timer = self._loop.call_later(_PERIOD_S, self._on_period)
        return len(events)

    def _on_period(self) -> None:
        was_full = self.poll() == _EVENTS
        if self._is_closed:
            return
        if self._count_nodes() < _FEW:
            self._timer = None
            self._loop.add_reader(self.fileno(), self.poll)
        else:
            self._timer = self._loop.call_later(0.0 if was_full else _PERIOD_S, self._on_period)

    def close(self) -> None:
        """End; may be called from `on_events`."""
        self._is_closed = True
        if self._timer is None:
            self._loop.remove_reader(self.fileno())
        else:
            self._timer.cancel()
        self._epoll.close()
