"""The event loop of the agent: epoll, timers and signals, with asyncio's method names.

The launch path does not import asyncio: that takes 38 ms of CPU, more than the whole single-node start. Objects of
the launcher use only the methods below. asyncio's loop has them with the same names and meanings, so the objects
also run on an asyncio loop.
"""

from __future__ import annotations

import heapq
import os
import select
import time

from bootseer.light_stdlib import deque, signal
from bootseer.light_typing import Any, Callable, Protocol

Callback = Callable[..., object]


class Timer:
    """A call scheduled for a point in time; `cancel` revokes it."""

    __slots__ = ("args", "callback", "when_s")

    def __init__(self, when_s: float, callback: Callback, args: tuple[Any, ...]) -> None:
        self.when_s = when_s
        self.callback: Callback | None = callback
        self.args = args

    def __lt__(self, other: Timer) -> bool:
        return self.when_s < other.when_s

    def cancel(self) -> None:
        self.callback = None
        self.args = ()


class Cancellable(Protocol):
    """The handle that `call_later` returns, here and in asyncio."""

    def cancel(self) -> None: ...


class Alarm:
    """At most one scheduled call."""

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._call: Cancellable | None = None

    @property
    def is_set(self) -> bool:
        """Whether `set` was called and `cancel` was not called since."""
        return self._call is not None

    def set(self, delay_s: float, callback: Callback, *args: Any) -> None:
        """Schedule a call; it replaces an earlier one."""
        self.cancel()
        self._call = self._loop.call_later(delay_s, callback, *args)

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None


class EventLoop(Protocol):
    """The part of an event loop that the launcher uses; `Loop` and asyncio's loop both have it."""

    def time(self) -> float: ...
    def call_soon(self, callback: Callback, *args: Any) -> Any: ...
    def call_later(self, delay: float, callback: Callback, *args: Any) -> Cancellable: ...
    def call_at(self, when: float, callback: Callback, *args: Any) -> Cancellable: ...
    def add_reader(self, fd: int, callback: Callback, *args: Any) -> None: ...
    def remove_reader(self, fd: int) -> bool: ...
    def add_writer(self, fd: int, callback: Callback, *args: Any) -> None: ...
    def remove_writer(self, fd: int) -> bool: ...
    def add_signal_handler(self, sig: int, callback: Callback, *args: Any) -> None: ...
    def stop(self) -> None: ...


class Loop:
    """A single-threaded event loop over epoll.

    Callbacks run one after another and must not block. An exception in a callback ends `run_forever`, so that a
    bug in the launcher cannot leave half a job running unnoticed.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._readers: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self._writers: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self._timers: list[Timer] = []
        self._ready: deque[tuple[Callback, tuple[Any, ...]]] = deque()
        self._signals: dict[int, tuple[Callback, tuple[Any, ...]]] = {}
        self._wakeup: tuple[int, int] | None = None
        self._running = False

    def time(self) -> float:
        """Return the monotonic clock in seconds."""
        return time.monotonic()

    def call_soon(self, callback: Callback, *args: Any) -> None:
        self._ready.append((callback, args))

    def call_later(self, delay: float, callback: Callback, *args: Any) -> Timer:
        return self.call_at(time.monotonic() + delay, callback, *args)

    def call_at(self, when: float, callback: Callback, *args: Any) -> Timer:
        timer = Timer(when, callback, args)
        heapq.heappush(self._timers, timer)
        return timer

    def add_reader(self, fd: int, callback: Callback, *args: Any) -> None:
        known = fd in self._readers or fd in self._writers
        self._readers[fd] = (callback, args)
        self._watch(fd, known)

    def remove_reader(self, fd: int) -> bool:
        if self._readers.pop(fd, None) is None:
            return False
        self._watch(fd, True)
        return True

    def add_writer(self, fd: int, callback: Callback, *args: Any) -> None:
        known = fd in self._readers or fd in self._writers
        self._writers[fd] = (callback, args)
        self._watch(fd, known)

    def remove_writer(self, fd: int) -> bool:
        if self._writers.pop(fd, None) is None:
            return False
        self._watch(fd, True)
        return True

    def _watch(self, fd: int, known: bool) -> None:
        mask = (select.EPOLLIN if fd in self._readers else 0) | (select.EPOLLOUT if fd in self._writers else 0)
        if not mask:
            self._epoll.unregister(fd)
        elif known:
            self._epoll.modify(fd, mask)
        else:
            self._epoll.register(fd, mask)

    def add_signal_handler(self, sig: int, callback: Callback, *args: Any) -> None:
        """Register a callback that runs in the loop, not in the signal handler, once for each delivery noticed."""
        if self._wakeup is None:
            read_fd, write_fd = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            self._wakeup = (read_fd, write_fd)
            signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
            self.add_reader(read_fd, self._on_wakeup, read_fd)
        self._signals[int(sig)] = (callback, args)
        signal.signal(sig, lambda *_: None)
        # Otherwise a system call that stops a rank could fail with EINTR in C code that does not retry.
        signal.siginterrupt(sig, False)

    def _on_wakeup(self, fd: int) -> None:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            return
        for number in data:
            found = self._signals.get(number)
            if found is not None:
                self._ready.append(found)

    def stop(self) -> None:
        """End `run_forever` once the callbacks that are ready now have run."""
        self._running = False

    def run_forever(self) -> None:
        self._running = True
        while self._running:
            self.run_once()

    def run_once(self, max_s: float | None = None) -> None:
        """Wait for the next event (or `max_s`) and run the callbacks that are ready."""
        while self._timers and self._timers[0].callback is None:
            heapq.heappop(self._timers)
        wait_s = -1.0 if max_s is None else max_s
        if self._ready:
            wait_s = 0.0
        elif self._timers:
            until_s = max(0.0, self._timers[0].when_s - time.monotonic())
            wait_s = until_s if wait_s < 0 else min(wait_s, until_s)
        events = self._epoll.poll(wait_s)
        for fd, mask, reader, writer in [
            (fd, mask, self._readers.get(fd), self._writers.get(fd)) for fd, mask in events
        ]:
            # An earlier callback may have removed this watch, and a new watch may have the same number.
            # Errors and hang-ups go to every watcher: its read or write then reports the error.
            if mask & ~select.EPOLLOUT and reader is not None and self._readers.get(fd) is reader:
                reader[0](*reader[1])
            if mask & ~select.EPOLLIN and writer is not None and self._writers.get(fd) is writer:
                writer[0](*writer[1])
        now_s = time.monotonic()
        while self._timers and self._timers[0].when_s <= now_s:
            timer = heapq.heappop(self._timers)
            if timer.callback is not None:
                self._ready.append((timer.callback, timer.args))
        for _ in range(len(self._ready)):
            callback, args = self._ready.popleft()
            callback(*args)

    def close(self) -> None:
        if self._wakeup is not None:
            signal.set_wakeup_fd(-1)
            for fd in self._wakeup:
                os.close(fd)
            self._wakeup = None
        self._epoll.close()
