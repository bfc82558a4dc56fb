"""The checkpoint service's side of the process that fills the arena (filler.py): its start, orders and news.

It is stateful beyond one process: a dead filler is replaced, and the next one gets the same news.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Callable
from typing import NamedTuple

from bootseer.checkpoint.io.arena import Unit
from bootseer.checkpoint.service.process import Child, Fork, end_child
from bootseer.logs import get_logger

_log = get_logger(__name__)


class FillerNews(NamedTuple):
    noted: Callable[[list[Unit], str, str], object]  # units are ready, or have failed: why, kind (filler.py)
    moved: Callable[[], object]  # bytes have arrived
    ended: Callable[[], object]  # the process has died


class FillerProcess:
    """At most one filler at a time; runs on the service's loop."""

    def __init__(self, selector: selectors.BaseSelector, fork: Fork, news: FillerNews) -> None:
        self._selector = selector
        self._fork = fork
        self._news = news
        self._child: Child | None = None
        self.starts = 0  # in this load
        self.from_disk_bytes = 0  # in this load
        self.damaged: set[Unit] = set()  # units whose copy on the disk is damaged

    @property
    def is_running(self) -> bool:
        return self._child is not None

    def begin_load(self) -> None:
        """Reset the counts of a load."""
        self.starts = self.from_disk_bytes = 0

    def start(self, work: Callable[[socket.socket], None]) -> None:
        """Start a filler, unless one is running. Raises: OSError."""
        if self._child is not None:
            return
        self._child = self._fork(work)
        self.starts += 1
        self._selector.register(self._child.lines.fd, selectors.EVENT_READ, self.receive)

    def stop(self) -> bool:
        """End the filler; return whether one was running."""
        child, self._child = self._child, None
        if child is not None:
            end_child(child, self._selector)
        return child is not None

    def send(self, **order: object) -> None:
        """Send an order (filler.py), if a filler is running."""
        if self._child is not None:
            self._child.lines.send(order)

    def receive(self) -> None:
        """Receive the news that have arrived."""
        assert self._child is not None
        lines = self._child.lines.receive_ready()
        for news in lines or ():
            if "ready" in news:
                self._news.noted(_to_units(news["ready"]), "", "")
            elif "failed_units" in news:
                self._news.noted(_to_units(news["failed_units"]), str(news["why"]), str(news["kind"]))
            elif "moved" in news:
                self._news.moved()
            elif "from_disk" in news:
                self.from_disk_bytes += int(news["from_disk"])
                self.damaged.update(_to_units(news["bad"]))
            elif "failed" in news:
                _log.warning("the reader of the checkpoint has failed: %s", news["failed"])
        if lines is None:
            self._news.ended()


def _to_units(pairs: list[list[int]]) -> list[Unit]:
    return [(file, unit) for file, unit in pairs]
