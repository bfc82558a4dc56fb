"""The only bridge from asyncio to threads, and from synchronous code to asyncio.

`run_io` is for calls that end by themselves (one bounded pool; a cancelled caller still waits for the call, so no
call continues unnoticed). `run_abandonable` is for calls that may hang (a thread that can be abandoned).
`run_sync` is for callers without an event loop. All survive a fork: the child begins with none of the parent's
threads.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar, cast

from bootseer import jitter as own
from bootseer.backoff import Backoff
from bootseer.errors import BootseerError, StorageError, Unavailable
from bootseer.tuning import current

APART_THREADS = 256
MAX_ABANDONED = 512  # hanging threads; each costs a stack and the objects of its call
IDLE_S = 2.0  # after which an idle thread ends
CLOSE_S = 1.0  # for which `close` waits for cancelled tasks

A = TypeVar("A")
T = TypeVar("T")


# ---- calls in threads --------------------------------------------------------------------------------------


async def run_io(func: Callable[..., T], *args: object) -> T:
    """Run a blocking call, of at most some 8 MiB, in the pool.

    Cancel: waits for a call that has begun, so its buffers belong to the caller again afterwards.
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


async def run_abandonable(
    func: Callable[..., T],
    *args: object,
    timeout_s: float,
    moved_s: Callable[[], float] | None = None,
    pool: AbandonablePool | None = None,
) -> T:
    """Run a call that may hang in its own thread; abandon it after `timeout_s` without progress.

    `moved_s` returns the time of the last progress (`time.monotonic`); without it only the end counts. An
    abandoned call continues in the background, maybe for ever: it may write only to its own memory (`Landing`).
    `pool`: its threads run the call, and its wait for one of them counts; None for one that all share.
    Cancel: abandons the call at once. Raises: TimeoutError; Unavailable if too many calls hang already.
    """
    call = _Call(func, args)
    threads = _apart if pool is None else pool
    threads.submit(call)
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
            threads.abandon(call)
    return call.take_outcome()


def statistics() -> dict[str, int]:
    """Return the numbers of threads of both kinds, of hanging abandoned calls, and of waiting calls."""
    apart = [_apart, *_list_pools()]
    return {
        "io_threads": _io.threads,
        "io_waiting": len(_io.calls),
        "apart_threads": sum(pool.threads for pool in apart),
        "apart_waiting": sum(len(pool.calls) for pool in apart),
        "abandoned": sum(pool.abandoned for pool in apart),
        "abandoned_ever": sum(pool.abandoned_ever for pool in apart),
    }


class _Outcome(Generic[T]):
    """A result or an error, held until it is taken."""

    _result: T | None = None
    _error: BaseException | None = None

    def take_outcome(self) -> T:
        """Return the result or raise the error; call it once, after the end."""
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # it holds this frame
        result, self._result = self._result, None
        return cast(T, result)


class _Call(_Outcome[T]):
    """A call in a pool.

    The future holds no error: it would keep the error's frames alive, and with them the call's arguments.
    """

    def __init__(self, func: Callable[..., T], args: tuple[object, ...]) -> None:
        self._func: Callable[..., T] | None = func
        self._args = args
        self._loop = asyncio.get_running_loop()
        self.is_done: asyncio.Future[None] = self._loop.create_future()
        self.is_abandoned = False

    def run(self) -> None:
        """Run the call, in the thread."""
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
            pass  # the loop is closed: no task waits

    def _finish(self) -> None:
        if not self.is_done.done():
            self.is_done.set_result(None)


class _Threads:
    """A bounded pool of daemon threads, started on demand, that end when idle."""

    def __init__(self, name: str, most: int = 0) -> None:
        """Args: most: threads; 0: `storage.io_threads` of `tuning`, read at the first call."""
        self._name = name
        self._most = most
        self.forget_threads()

    def forget_threads(self) -> None:
        """Begin with no threads and no calls, as in a forked child, whose parent's threads may have held locks."""
        self._made = 0
        self._idle = 0
        self._epoch = 0  # `end_idle` begins a new one
        self._change = threading.Condition(threading.Lock())
        self._running: set[_Call[Any]] = set()
        self.calls: deque[_Call[Any]] = deque()
        self.threads = self.abandoned = self.abandoned_ever = 0

    def submit(self, call: _Call[Any]) -> None:
        with self._change:
            if self.abandoned >= MAX_ABANDONED:
                raise Unavailable(
                    f"{self.abandoned} calls hang and were abandoned: is a file system or server not answering?"
                )
            self._most = self._most or current().storage.io_threads
            self.calls.append(call)
            if self._idle >= len(self.calls):
                self._change.notify()
                return
            try:
                self._start_thread()
            except RuntimeError as error:
                if not self.threads:
                    self.calls.remove(call)
                    raise Unavailable("no thread could be started: is the limit of processes reached?") from error

    def _start_thread(self) -> None:
        """Start one more, if that is allowed. With the lock held. Raises: RuntimeError."""
        if self.threads < self._most:
            self._made += 1
            threading.Thread(
                target=self._work, args=(self._epoch,), name=f"{self._name}-{self._made}", daemon=True
            ).start()
            self.threads += 1

    def try_drop(self, call: _Call[Any]) -> bool:
        """Remove a call that has not begun; return whether that succeeded."""
        with self._change:
            try:
                self.calls.remove(call)
            except ValueError:
                return False
            return True

    def abandon(self, call: _Call[Any]) -> None:
        """Abandon a call, begun or not; its thread no longer counts, and ends if the call ever returns."""
        with self._change:
            if call in self._running:
                call.is_abandoned = True
                self.threads -= 1
                self.abandoned += 1
                self.abandoned_ever += 1
                if self.calls:  # they would wait for a thread that no longer counts
                    with suppress(RuntimeError):  # the limit of processes: the next call tries again
                        self._start_thread()
            elif call in self.calls:
                self.calls.remove(call)

    def end_idle(self) -> None:
        """End idle threads now."""
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


class AbandonablePool(_Threads):
    """A few threads of one user for `run_abandonable`. Abandoned calls do not count among them."""

    def __init__(self, name: str, threads: int) -> None:
        super().__init__(f"bootseer-{name}", threads)
        with _pools_lock:
            _pools.add(self)


async def _outlast(future: asyncio.Future[Any]) -> None:
    """Wait for a future, also if the task is cancelled."""
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError:
            pass  # the caller is about to raise one


# ---- concurrency and retries -------------------------------------------------------------------------------


class TaskGroup(asyncio.TaskGroup):
    """A task group that raises its first error alone, without an exception group."""

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(kind, error, trace)
            return
        except BaseExceptionGroup as failures:
            failure = failures.exceptions[0]
        try:
            raise failure from failure.__cause__
        finally:
            del failure, error, trace  # they hold this frame


async def map_bounded(func: Callable[[A], Awaitable[T]], items: Iterable[A], *, width: int) -> list[T]:
    """Apply `func` to all items, at most `width` at once; return results in the order of the items.

    Raises the first error, after all running calls have ended.
    """
    results: dict[int, T] = {}
    numbered = enumerate(items)

    async def work() -> None:
        for index, item in numbered:
            results[index] = await func(item)

    async with TaskGroup() as group:
        # Waiting here: a group that learns of a failure at its end stays cancelled (Python 3.11).
        await asyncio.wait([group.create_task(work()) for _ in range(max(1, width))])
    return [results[index] for index in range(len(results))]


class RetryPolicy(NamedTuple):
    """The number and times of the tries of a failing call."""

    tries: int = 4
    base_s: float = 0.1  # the first wait is random up to it, each further one up to twice as much
    max_s: float = 5.0  # of one wait
    budget_s: float = 30.0  # after the first try; no try begins later

    def wait_s(self, failures: int, jitter: float) -> float:
        """Return the wait after so many failures in a row. `jitter`: a number from 0 to 1."""
        return Backoff(self.base_s, self.max_s).wait_s(failures, jitter)


async def retry(
    policy: RetryPolicy,
    call: Callable[[int], Awaitable[T]],
    *,
    on_retry: Callable[[], None] | None = None,
    jitter: Callable[[], float] = own.jitter,
) -> T:
    """Return the result of `call(attempt)`; retry after errors that are marked as retryable.

    It respects a store's `retry_after_s`. `jitter` returns numbers from 0 to 1.
    """
    started_s = time.monotonic()
    for attempt in range(policy.tries):
        try:
            return await call(attempt)
        except BootseerError as error:
            if not error.retryable or attempt + 1 >= policy.tries:
                raise
            asked_s = error.retry_after_s if isinstance(error, StorageError) else 0.0
            wait_s = max(asked_s, policy.wait_s(attempt + 1, jitter()))
            if time.monotonic() + wait_s > started_s + policy.budget_s:
                raise
        if on_retry is not None:
            on_retry()
        await asyncio.sleep(wait_s)
    raise ValueError(f"invalid policy of {policy.tries} tries")


# ---- from synchronous code ---------------------------------------------------------------------------------


def run_sync(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the process's background loop, from any thread but that loop's own.

    An exception of a signal handler in the waiting thread (KeyboardInterrupt) cancels the coroutine. It is raised
    when the coroutine has ended, or at once if a second one arrives.
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
    """End the background loop and idle threads; later calls start new ones."""
    global _background
    with _background_lock:
        background, _background = _background, None
    if background is not None and background.thread.ident != threading.get_ident():
        background.end()
    for pool in (_io, _apart, *_list_pools()):
        pool.end_idle()


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
        """Cancel all tasks and stop; waits at most CLOSE_S for a call that hangs in a thread."""
        ending = asyncio.run_coroutine_threadsafe(self._cancel_all(), self.loop)
        try:
            ending.result(CLOSE_S)
        except BaseException:
            pass  # a call hangs; the loop is stopped anyway
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
    """Start afresh in a forked child: its threads are gone, and may have held locks."""
    global _io, _apart, _background, _background_lock, _pools_lock
    if _background is not None:
        _inherited.append(_background)
    _io, _apart = _Threads("bootseer-io"), _Threads("bootseer-apart", APART_THREADS)
    _background, _background_lock = None, threading.Lock()
    _pools_lock = threading.Lock()
    for pool in _list_pools():
        pool.forget_threads()


def _list_pools() -> list[AbandonablePool]:
    with _pools_lock:
        return list(_pools)


_pools: weakref.WeakSet[AbandonablePool] = weakref.WeakSet()
_pools_lock = threading.Lock()
_io = _Threads("bootseer-io")
_apart = _Threads("bootseer-apart", APART_THREADS)
_background: _Background | None = None
_background_lock = threading.Lock()
# Never closed: that would remove the parent's descriptors from the epoll set that both share.
_inherited: list[_Background] = []

os.register_at_fork(after_in_child=_forget_after_fork)
atexit.register(close)
