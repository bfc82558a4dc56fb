"""What is sent to everybody who watches a job: its state when it has changed, and its events as they are written.

One feed a job, however many watch. Frames are encoded once. A watcher that is slow loses older states, as a newer
one has all of them; if its events do not fit, it is cut off, and comes back with the number of its last event.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from bootseer import aio
from bootseer.errors import BootseerError
from launcher.ranks.output.inotify import Inotify
from launcher.serve.event_log import EventLog, LoggedEvent
from launcher.serve.jobs import Jobs, JobView
from launcher.serve.views import make_detail

STATE_S = 2.0  # between two states
SETTLE_S = 0.05  # after a file has changed: what is written together is sent together
POLL_S = 1.0  # files of which the kernel tells nothing, as on a network file system
READ_S = 20.0  # for a read that hangs
MAX_QUEUED_BYTES = 1 << 20  # of events, for one watcher
MAX_WATCHERS = 1024


class TooManyError(Exception):
    """Too many watch already."""


class Frame(NamedTuple):
    """One message of a stream of server-sent events, encoded."""

    data: bytes
    is_state: bool  # a newer one replaces it


class Watcher:
    """One client of a feed: frames that wait for it."""

    def __init__(self, on_cut: Callable[[], object]) -> None:
        """Args: on_cut: called when it is too slow: its connection may wait for it for ever."""
        self._on_cut = on_cut
        self._frames: deque[Frame] = deque()
        self._bytes = 0
        self._is_ready = asyncio.Event()
        self.is_cut = False
        self.have = 0  # number of the last event that it got

    def put(self, frame: Frame) -> None:
        """Add a frame; a state replaces one that waits; too many events cut the watcher off."""
        if frame.is_state:
            old = next((place for place, each in enumerate(self._frames) if each.is_state), None)
            if old is not None:
                self._bytes -= len(self._frames[old].data)
                del self._frames[old]
        elif self._bytes + len(frame.data) > MAX_QUEUED_BYTES and self._frames:
            self.is_cut = True
            self._on_cut()
        self._frames.append(frame)
        self._bytes += len(frame.data)
        self._is_ready.set()

    def begin(self, frames: Iterable[Frame]) -> None:
        """Add what it has missed; that is bounded by what is kept."""
        for frame in frames:
            self._frames.append(frame)
            self._bytes += len(frame.data)

    def end(self) -> None:
        """Let it have what waits, and no more."""
        self.is_cut = True
        self._is_ready.set()

    async def take(self) -> bytes:
        """Return all frames that wait, at least one; b"" once it is cut off."""
        await self._is_ready.wait()
        self._is_ready.clear()
        if self.is_cut:
            return b""
        data = b"".join(frame.data for frame in self._frames)
        self._frames.clear()
        self._bytes = 0
        return data


class Feed:
    """The feed of one job; it works only while it is watched."""

    def __init__(self, jobs: Jobs, view: JobView, log: EventLog | None) -> None:
        """Args: log: None for a job without events."""
        self._jobs, self._log = jobs, log
        self.name = view.name
        self._view = view
        self._watchers: set[Watcher] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._poll_lock = asyncio.Lock()
        self._state = b""
        self._hangs = False  # reading the events

    @property
    def is_idle(self) -> bool:
        """Whether nobody watches."""
        return not self._watchers

    async def watch(self, last: str, on_cut: Callable[[], object]) -> Watcher:
        """Add a watcher. Args: last: id of the last event that it has, "" for none; on_cut: see Watcher.

        Raises: TooManyError.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyError
        await self.catch_up()
        watcher = Watcher(on_cut)
        watcher.begin(self._missed(last))
        watcher.have = 0 if self._log is None else self._log.last
        watcher.put(_frame("state", self._encode(self._view)))
        self._watchers.add(watcher)
        if not self._tasks:
            self._tasks = [
                asyncio.create_task(self._send_states()),
                asyncio.create_task(self._send_events()),
            ]
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher; the last one stops the work."""
        self._watchers.discard(watcher)
        if not self._watchers:
            self._stop()

    async def catch_up(self) -> None:
        """Read what the job has written by now."""
        if self._log is None:
            return
        async with self._poll_lock:
            try:
                while not self._hangs and await aio.run_abandonable(self._log.poll, timeout_s=READ_S):
                    pass
            except OSError:
                pass  # the directory is gone
            except TimeoutError:
                self._hangs = True  # the call goes on, maybe for ever: the log belongs to it

    def end(self) -> None:
        """End all streams, whose clients come back: this is another job now, under the same name."""
        for watcher in self._watchers:
            watcher.end()

    async def close(self) -> None:
        self.end()
        tasks = self._stop()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stop(self) -> list[asyncio.Task[None]]:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        return tasks

    # ---- states ----------------------------------------------------------------------------------------------

    async def _send_states(self) -> None:
        while True:
            await asyncio.sleep(STATE_S)
            try:
                found = await self._jobs.find(self.name, STATE_S / 2)
            except BootseerError:
                continue  # the directory of sockets cannot be read now
            if found is None:
                continue
            self._view = found
            state = self._encode(found)
            if state != self._state:
                self._state = state
                self._send(_frame("state", state))

    @staticmethod
    def _encode(view: JobView) -> bytes:
        return msgspec.json.encode(make_detail(view))

    # ---- events ----------------------------------------------------------------------------------------------

    async def _send_events(self) -> None:
        if self._log is None:
            return
        with _Changes(self._log.directory) as changes:
            while True:
                sent, epoch = self._log.last, self._log.epoch
                await changes.wait(POLL_S)
                await self.catch_up()
                if self._log.epoch != epoch:
                    self._send(_frame("reset", b"{}"))
                    sent = 0
                    for watcher in self._watchers:
                        watcher.have = 0
                for event in self._log.after(sent):
                    self._send_event(event)

    def _missed(self, last: str) -> list[Frame]:
        """Return the events that a watcher lacks; if some are no longer kept, first the order to begin anew."""
        if self._log is None:
            return []
        epoch, _, number = last.partition("-")
        is_known = epoch == self._log.epoch and number.isdecimal() and len(number) < 16
        have = int(number) if is_known else 0
        frames = [self._event_frame(event) for event in self._log.after(have)]
        if last and (not is_known or have + 1 < self._log.first):
            frames.insert(0, _frame("reset", b"{}"))
        return frames

    def _event_frame(self, event: LoggedEvent) -> Frame:
        assert self._log is not None
        return Frame(b"id: %b-%d\nevent: event\ndata: %b\n\n" % (self._log.epoch.encode(), *event), False)

    def _send_event(self, event: LoggedEvent) -> None:
        frame = self._event_frame(event)
        for watcher in self._watchers:
            if event.number > watcher.have:
                watcher.have = event.number
                watcher.put(frame)

    def _send(self, frame: Frame) -> None:
        for watcher in self._watchers:
            watcher.put(frame)


class _Changes:
    """Waits until a file of a directory has changed."""

    def __init__(self, directory: str) -> None:
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._inotify: Inotify | None = None
        try:
            self._inotify = Inotify()
            self._inotify.watch(directory)
            self._loop.add_reader(self._inotify.fd, self._note)
        except OSError:
            self._close()  # the time decides

    async def wait(self, timeout_s: float) -> None:
        """Return a moment after the next change, or after this time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        await asyncio.sleep(SETTLE_S)
        self._changed.clear()

    def _note(self) -> None:
        if self._inotify is not None:
            self._inotify.read()
            self._changed.set()

    def _close(self) -> None:
        if self._inotify is not None:
            self._loop.remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None

    def __enter__(self) -> _Changes:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()


def _frame(name: str, data: bytes) -> Frame:
    return Frame(b"event: %b\ndata: %b\n\n" % (name.encode(), data), name == "state")
