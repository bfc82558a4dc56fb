"""An iterator that is run in a thread, some items ahead of whoever takes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


@contextmanager
def read_ahead(items: Iterator[T], most: int) -> Iterator[Iterator[T]]:
    """The same items; up to `most` wait. Errors of the iterator come after the items before them.

    When the block ends the thread has ended too: at once if it waits, else when the item in the making is made.
    """
    ahead = _Ahead(items, most)
    ahead.thread.start()
    try:
        yield ahead.take()
    finally:
        ahead.stop()


class _Ahead(Generic[T]):
    def __init__(self, items: Iterator[T], most: int) -> None:
        self._items = items
        self._most = most
        self._made: deque[T] = deque()
        self._change = threading.Condition()
        self._is_done = self._is_stopped = False
        self._error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="tree-read", daemon=True)

    def take(self) -> Iterator[T]:
        while True:
            with self._change:
                while not self._made and not self._is_done:
                    self._change.wait()
                if not self._made:
                    break
                item = self._made.popleft()
                self._change.notify_all()
            yield item
        error, self._error = self._error, None
        if error is not None:
            raise error

    def stop(self) -> None:
        with self._change:
            self._is_stopped = True
            self._made.clear()
            self._change.notify_all()
        self.thread.join()

    def _run(self) -> None:
        try:
            for item in self._items:
                with self._change:
                    while len(self._made) >= self._most and not self._is_stopped:
                        self._change.wait()
                    if self._is_stopped:
                        break
                    self._made.append(item)
                    self._change.notify_all()
        except BaseException as error:  # raised again by whoever takes
            self._error = error
        finally:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()
            with self._change:
                self._is_done = True
                self._change.notify_all()
