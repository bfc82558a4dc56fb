"""Watches the ranks' event files of an attempt until every rank has made its first step.

In: event files that ranks append to. Out: one call, at the last first step or when the attempt is over. The ranks
are not asked anything and wait for nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from launcher.loop import Cancellable, EventLoop

# Up to its first step a rank writes a handful of short events.
MOST_READ_BYTES = 256 * 1024
CLOSE_AFTER_S = 1.0
POLL_S = 5.0  # where the system has no inotify to give
_FIRST_STEP = b'"first_step"'


class StartWatch:
    """One for each attempt; `finish` must be called at its end. `tell`: whether all have made their first step."""

    def __init__(self, loop: EventLoop, files: Mapping[int, str], tell: Callable[[bool], object]) -> None:
        from launcher.ranks.inotify import Inotify

        self._loop = loop
        self._tell = tell
        self._waiting = dict(files)  # rank: path
        self._by_watch: dict[int, int] = {}
        self._inotify: Inotify | None = None
        self._timer: Cancellable | None = None
        self._done = False
        try:
            self._inotify = Inotify()
            for rank, path in files.items():
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644))
                self._by_watch[self._inotify.watch(path)] = rank
            loop.add_reader(self._inotify.fd, self._on_news)
        except OSError:
            self.stop()
            self._poll()
            return
        for rank in list(files):
            self._look(rank)

    def finish(self) -> None:
        """The attempt is over: says the line now unless it has been said."""
        self.stop()
        if not self._done:
            self._done = True
            self._tell(not self._waiting)

    def _on_news(self) -> None:
        assert self._inotify is not None
        for watch in self._inotify.read():
            rank = self._by_watch.get(watch)
            for each in [rank] if rank is not None else list(self._waiting):
                self._look(each)

    def _poll(self) -> None:
        for rank in list(self._waiting):
            self._look(rank)
        if not self._done:
            self._timer = self._loop.call_later(POLL_S, self._poll)

    def _look(self, rank: int) -> None:
        path = self._waiting.get(rank)
        if path is None:
            return
        try:
            with open(path, "rb") as file:
                data = file.read(MOST_READ_BYTES)
        except OSError:
            return
        if _FIRST_STEP in data:
            del self._waiting[rank]
            if not self._waiting:
                self.finish()

    def stop(self) -> None:
        """Looks no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            # The kernel takes 8 ms to close it, which a restart need not wait for.
            self._loop.call_later(CLOSE_AFTER_S, self._inotify.close)
            self._inotify = None
