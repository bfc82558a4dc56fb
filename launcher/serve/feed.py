"""What is sent to everybody who watches a job: its state when it has changed, and its events as they are written.

One feed a job, however many watch. Frames are encoded once. A watcher that is slow loses older states, as a newer
one has all of them; if its events do not fit, it is cut off, and comes back with the number of its last event.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
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
HUNG_S = 30.0  # after one: until the files are read anew
MAX_QUEUED_BYTES = 1 << 20  # of events, for one watcher
MAX_WATCHERS = 1024
BEGAN_SLACK_S = 600.0  # by how much other nodes may have begun earlier, or have another clock


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
        self._is_ready.set()

    def end(self) -> None:
        """Send it no more: its client comes back."""
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
    """The feed of one job; it works only while it is watched, or asked for counts."""

    def __init__(self, jobs: Jobs, view: JobView) -> None:
        self._jobs, self._view = jobs, view
        self.log = _make_log(view)  # None for a job without events
        self._watchers: set[Watcher] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._lock = asyncio.Lock()  # held while a thread reads the log
        self._state = b""
        self._sent, self._epoch = 0, ""  # last event that was sent, and the epoch of its number
        self._retry_s = 0.0  # when a log whose read has hung is read anew

    @property
    def is_idle(self) -> bool:
        """Whether nobody watches."""
        return not self._watchers

    def is_of(self, view: JobView) -> bool:
        """Whether it is of this job, and not of an earlier one of this name; events may have begun meanwhile."""
        return view.path == self._view.path and (self.log is not None or _make_log(view) is None)

    async def watch(self, last: str, on_cut: Callable[[], object]) -> Watcher:
        """Add a watcher. Args: last: id of the last event that it has, "" for none; on_cut: see Watcher.

        Raises: TooManyError.
        """
        if len(self._watchers) >= MAX_WATCHERS:
            raise TooManyError
        watcher = Watcher(on_cut)
        async with self._lock:
            await self._read()
            watcher.begin(self._missed(last))
            watcher.have = 0 if self.log is None else self.log.last
            watcher.put(_frame("state", self._encode(self._view)))
            self._watchers.add(watcher)
            if not self._tasks:
                if self.log is not None:
                    self._sent, self._epoch = self.log.last, self.log.epoch
                self._begin(self._send_states())
                self._begin(self._send_events())
        return watcher

    def leave(self, watcher: Watcher) -> None:
        """Remove a watcher; the last one stops the work."""
        self._watchers.discard(watcher)
        if not self._watchers:
            self._stop()

    async def counts(self) -> dict[tuple[str, str], int]:
        """Return the numbers of events so far, by name and stage."""
        async with self._lock:
            await self._read()
            return {} if self.log is None else dict(self.log.counts)

    def end(self) -> None:
        """End all streams, whose clients come back: this is another job now, under the same name."""
        for watcher in self._watchers:
            watcher.end()

    async def close(self) -> None:
        self.end()
        await asyncio.gather(*self._stop(), return_exceptions=True)

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(self._on_end)
        self._tasks.append(task)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        """Have clients come back after an error of ours, rather than wait for nothing."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            print(f"bootseer serve: job {self._view.name[:80]}: {error!r}", file=sys.stderr, flush=True)
            self.end()

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
                found = await self._jobs.find(self._view.name, STATE_S / 2)
            except BootseerError:
                continue  # the directory of sockets cannot be read now
            if found is None:
                continue
            if not self.is_of(found):
                self.end()
                return
            self._view = found
            state = self._encode(found)
            if state != self._state:
                self._state = state
                self._send(_frame("state", state))

    @staticmethod
    def _encode(view: JobView) -> bytes:
        return msgspec.json.encode(make_detail(view))

    # ---- events ----------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        """Read what the job has written by now. The lock is held."""
        if self.log is None or time.monotonic() < self._retry_s:
            return
        try:
            while await aio.run_abandonable(self.log.poll, timeout_s=READ_S):
                pass
        except TimeoutError:
            # The call goes on, maybe for ever, and the log belongs to it.
            self.log, self._retry_s = _make_log(self._view), time.monotonic() + HUNG_S
        except (OSError, BootseerError):
            pass  # the directory is gone, or too many calls hang

    async def _send_events(self) -> None:
        if self.log is None:
            return
        with _Changes(self.log.directory) as changes:
            while True:
                await changes.wait(POLL_S)
                async with self._lock:
                    await self._read()
                    self._send_new(self.log)

    def _send_new(self, log: EventLog) -> None:
        if log.epoch != self._epoch:
            self._sent, self._epoch = 0, log.epoch
            self._send(_frame("reset", b"{}"))
            for watcher in self._watchers:
                watcher.have = 0
        for event in log.after(self._sent):
            frame = _event_frame(log, event)
            for watcher in self._watchers:
                if event.number > watcher.have:
                    watcher.have = event.number
                    watcher.put(frame)
        self._sent = log.last

    def _missed(self, last: str) -> list[Frame]:
        """Return the events that a watcher lacks; if some are no longer kept, first the order to begin anew."""
        log = self.log
        if log is None:
            return []
        epoch, _, number = last.partition("-")
        is_known = epoch == log.epoch and number.isdecimal() and len(number) < 16
        have = int(number) if is_known else 0
        frames = [_event_frame(log, event) for event in log.after(have)]
        if last and (not is_known or have + 1 < log.first):
            frames.insert(0, _frame("reset", b"{}"))
        return frames

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


def _make_log(view: JobView) -> EventLog | None:
    directory, runs_s = view.status.get("events"), view.status.get("runs_s")
    if not isinstance(directory, str):
        return None
    older_s = time.monotonic() - view.agents[0].at_s  # than now is the answer
    began_s = time.time() - older_s - (runs_s if isinstance(runs_s, int | float) else 0.0)
    return EventLog(directory, view.run_id, int((began_s - BEGAN_SLACK_S) * 1e9))


def _event_frame(log: EventLog, event: LoggedEvent) -> Frame:
    return Frame(b"id: %b-%d\nevent: event\ndata: %b\n\n" % (log.epoch.encode(), *event), False)


def _frame(name: str, data: bytes) -> Frame:
    return Frame(b"event: %b\ndata: %b\n\n" % (name.encode(), data), name == "state")
