"""The only door from asyncio to threads, and from plain code to asyncio.

`run_io` for calls that end by themselves (one bounded pool; a cancelled caller still waits for the call, so that
nothing goes on behind its back), `run_apart` for calls that may hang (a thread that can be given up), `run_sync`
for callers that have no event loop. All survive a fork: the child begins with none of the parent's threads.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import random
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Generic, NamedTuple, TypeVar, cast

from bootseer.errors import BootseerError, StorageError, Unavailable

IO_THREADS = 64
APART_THREADS = 256
MOST_ABANDONED = 512  # hanging threads; each costs a stack and whatever its call holds
IDLE_S = 2.0  # a thread with nothing to do ends after it
CLOSE_S = 1.0  # how long `close` waits for what it has cancelled

A = TypeVar("A")
T = TypeVar("T")


# ---- calls in threads --------------------------------------------------------------------------------------


async def run_io(func: Callable[..., T], *args: object) -> T:
    """Runs a blocking call, of at most some 8 MiB, in the pool.

    Cancel: a call that has begun is waited for, so whatever it writes to is the caller's again afterwards.
    """
    call = _Call(func, args)
    _io.submit(call)
    try:
        await asyncio.shield(call.is_done)
    except asyncio.CancelledError:
        if not _io.try_drop(call):
            await _outlast(call.is_done)
        raise
    return call.take_outcome()


async def run_apart(
    func: Callable[..., T], *args: object, timeout_s: float, moved_s: Callable[[], float] | None = None
) -> T:
    """Runs a call that may hang in a thread of its own; it is given up when it makes no progress for `timeout_s`.

    `moved_s` tells when it made progress last (`time.monotonic`); without it only its end counts. A call that was
    given up goes on in the background, maybe for good: let it write nowhere but to memory of its own (`Landing`).
    Cancel: gives the call up at once. Raises: TimeoutError; Unavailable when too many hang already.
    """
    call = _Call(func, args)
    _apart.submit(call)
    started_s = time.monotonic()
    try:
        while not call.is_done.done():
            last_s = started_s if moved_s is None else max(started_s, moved_s())
            left_s = last_s + timeout_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"no progress for {timeout_s:g} s")
            await asyncio.wait({call.is_done}, timeout=left_s)
    finally:
        if not call.is_done.done():
            _apart.abandon(call)
    return call.take_outcome()


def statistics() -> dict[str, int]:
    """Threads of both kinds now, those given up that still hang, and the calls that wait for a thread."""
    return {
        "io_threads": _io.threads,
        "io_waiting": len(_io.calls),
        "apart_threads": _apart.threads,
        "apart_waiting": len(_apart.calls),
        "abandoned": _apart.abandoned,
        "abandoned_ever": _apart.abandoned_ever,
    }


class _Outcome(Generic[T]):
    """What came of something, until somebody takes it."""

    _result: T | None = None
    _error: BaseException | None = None

    def take_outcome(self) -> T:
        """Once, when it is done."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame
        result, self._result = self._result, None
        return cast(T, result)


class _Call(_Outcome[T]):
    """A call on its way through a pool.

    The future holds no error: it would keep the error's frames, and with them whatever the call was given, alive.
    """

    def __init__(self, func: Callable[..., T], args: tuple[object, ...]) -> None:
        self._func: Callable[..., T] | None = func
        self._args = args
        self._loop = asyncio.get_running_loop()
        self.is_done: asyncio.Future[None] = self._loop.create_future()
        self.is_abandoned = False

    def run(self) -> None:
        """In the thread."""
        func, args = self._func, self._args
        assert func is not None
        self._func, self._args = None, ()
        try:
            self._result = func(*args)
        except BaseException as error:
            self._error = error
        del func, args
        if self.is_abandoned:
            self._result = self._error = None
            return
        try:
            self._loop.call_soon_threadsafe(self._finish)
        except RuntimeError:
            pass  # the loop is closed: nobody waits

    def _finish(self) -> None:
        if not self.is_done.done():
            self.is_done.set_result(None)


class _Threads:
    """Daemon threads made when needed, at most so many, that end when idle."""

    def __init__(self, name: str, most: int) -> None:
        self._name = name
        self._most = most
        self._made = 0
        self._idle = 0
        self._epoch = 0  # `end_idle` begins a new one
        self._change = threading.Condition(threading.Lock())
        self._running: set[_Call[Any]] = set()
        self.calls: deque[_Call[Any]] = deque()
        self.threads = self.abandoned = self.abandoned_ever = 0

    def submit(self, call: _Call[Any]) -> None:
        with self._change:
            if self.abandoned >= MOST_ABANDONED:
                raise Unavailable(
                    f"{self.abandoned} calls hang and were given up: is a file system or server not answering?"
                )
            self.calls.append(call)
            if self._idle >= len(self.calls):
                self._change.notify()
            elif self.threads < self._most:
                self._made += 1
                thread = threading.Thread(
                    target=self._work, args=(self._epoch,), name=f"{self._name}-{self._made}", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:
                    if not self.threads:
                        self.calls.remove(call)
                        raise Unavailable(
                            "no thread could be started: is a limit of processes reached?"
                        ) from error
                else:
                    self.threads += 1

    def try_drop(self, call: _Call[Any]) -> bool:
        """Takes back a call that has not begun."""
        with self._change:
            try:
                self.calls.remove(call)
            except ValueError:
                return False
            return True

    def abandon(self, call: _Call[Any]) -> None:
        """Gives up a call, begun or not; its thread counts no longer, and ends if it ever comes back."""
        with self._change:
            if call in self._running:
                call.is_abandoned = True
                self.threads -= 1
                self.abandoned += 1
                self.abandoned_ever += 1
            elif call in self.calls:
                self.calls.remove(call)

    def end_idle(self) -> None:
        """Threads without work end now instead of a little later."""
        with self._change:
            self._epoch += 1
            self._change.notify_all()

    def _work(self, epoch: int) -> None:
        while True:
            with self._change:
                while not self.calls:
                    self._idle += 1
                    is_notified = self._change.wait(IDLE_S)
                    self._idle -= 1
                    if not self.calls and (not is_notified or self._epoch != epoch):
                        self.threads -= 1
                        return
                call = self.calls.popleft()
                self._running.add(call)
            call.run()
            with self._change:
                self._running.discard(call)
                if call.is_abandoned:
                    self.abandoned -= 1
                    return
            del call


async def _outlast(future: asyncio.Future[Any]) -> None:
    """Waits for a future whatever else happens to the task."""
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            pass  # the caller is about to raise one


# ---- several at once, again, and in order ------------------------------------------------------------------


async def map_bounded(func: Callable[[A], Awaitable[T]], items: Iterable[A], *, width: int) -> list[T]:
    """`func` of all items, at most `width` at once; results in the order of the items.

    Raises the first error, when all that had begun has ended.
    """
    results: dict[int, T] = {}
    numbered = enumerate(items)

    async def work() -> None:
        for index, item in numbered:
            results[index] = await func(item)

    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            # Waited for here: a group that is told of a failure at its end stays cancelled (Python 3.11).
            await asyncio.wait([group.create_task(work()) for _ in range(max(1, width))])
    except BaseExceptionGroup as failures:
        failure = failures.exceptions[0]
    if failure is not None:
        try:
            raise failure
        finally:
            del failure  # it holds this frame
    return [results[index] for index in range(len(results))]


class RetryPolicy(NamedTuple):
    """How often and how long a failed call is tried again."""

    tries: int = 4
    base_s: float = 0.1  # the first wait is random up to it, each further one up to twice as much
    most_s: float = 5.0  # of one wait
    budget_s: float = 30.0  # no try begins later than this after the first one


async def retry(
    policy: RetryPolicy,
    call: Callable[[int], Awaitable[T]],
    *,
    on_retry: Callable[[], None] | None = None,
    jitter: Callable[[], float] = random.random,
) -> T:
    """The result of `call(attempt)`; errors that say that another try may help are tried again.

    A store's wish (`retry_after_s`) is kept. `jitter` gives numbers from 0 to 1.
    """
    started_s = time.monotonic()
    for attempt in range(policy.tries):
        try:
            return await call(attempt)
        except BootseerError as error:
            if not error.retryable or attempt + 1 >= policy.tries:
                raise
            asked_s = error.retry_after_s if isinstance(error, StorageError) else 0.0
            wait_s = max(asked_s, jitter() * min(policy.most_s, policy.base_s * 2.0**attempt))
            if time.monotonic() + wait_s > started_s + policy.budget_s:
                raise
        if on_retry is not None:
            on_retry()
        await asyncio.sleep(wait_s)
    raise ValueError(f"a policy of {policy.tries} tries")


# ---- from plain code ---------------------------------------------------------------------------------------


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine on the process's background loop; from any thread but that loop's own.

    What a signal handler raises in the waiting thread (KeyboardInterrupt) cancels the coroutine; it is out when
    that has ended, or at once at the second one.
    """
    background = _get_background()
    if threading.get_ident() == background.thread.ident:
        coroutine.close()
        raise RuntimeError("run_sync was called on the background loop itself: await the coroutine there")
    run = _Run(background.loop, coroutine)
    try:
        run.is_done.wait()
    except BaseException:
        run.cancel()
        run.is_done.wait()
        raise
    return run.take_outcome()


def close() -> None:
    """Ends the background loop and idle threads. What comes later makes new ones."""
    global _background
    with _background_lock:
        background, _background = _background, None
    if background is not None and background.thread.ident != threading.get_ident():
        background.end()
    _io.end_idle()
    _apart.end_idle()


class _Run(_Outcome[T]):
    """A coroutine on the background loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self.is_done = threading.Event()
        try:
            loop.call_soon_threadsafe(self._begin)
        except RuntimeError:
            coroutine.close()
            raise

    def cancel(self) -> None:
        self._loop.call_soon_threadsafe(self._cancel)

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._finish)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _finish(self, task: asyncio.Task[T]) -> None:
        self._task = None  # it holds the error
        if task.cancelled():
            self._error = RuntimeError("the coroutine was cancelled: the background loop was closed")
        else:
            self._error = task.exception()
            if self._error is None:
                self._result = task.result()
        self.is_done.set()


class _Background:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name="bootseer-loop", daemon=True)
        self.thread.start()

    def end(self) -> None:
        """Cancels what runs and stops; a call that hangs in a thread is not waited for long."""
        ending = asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop)
        try:
            ending.result(CLOSE_S)
        except BaseException:
            pass  # something hangs; the loop is stopped all the same
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(CLOSE_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    @staticmethod
    async def _cancel_all() -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.get_running_loop().shutdown_asyncgens()


def _get_background() -> _Background:
    global _background
    with _background_lock:
        if _background is None:
            _background = _Background()
        return _background


def _forget_after_fork() -> None:
    """In the child of a fork: threads are gone, locks may be held by threads that are gone."""
    global _io, _apart, _background, _background_lock
    if _background is not None:
        _inherited.append(_background)
    _io, _apart = _Threads("bootseer-io", IO_THREADS), _Threads("bootseer-apart", APART_THREADS)
    _background, _background_lock = None, threading.Lock()


_io = _Threads("bootseer-io", IO_THREADS)
_apart = _Threads("bootseer-apart", APART_THREADS)
_background: _Background | None = None
_background_lock = threading.Lock()
# Never closed: that would take the parent's descriptors out of the epoll set that both share.
_inherited: list[_Background] = []

os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(close)
