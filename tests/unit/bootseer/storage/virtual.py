"""An event loop whose time passes only while everybody waits: tests of delays that take no time and never vary."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

MAX_S = 1e6  # a test that is still waiting then hangs


class _Selector(selectors.DefaultSelector):
    """Instead of waiting it puts the clock forward."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError(f"everybody waits for ever, at {self.now_s:.3f} s")
            self.now_s += timeout
            assert self.now_s < MAX_S, "this takes for ever"
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-6  # else timers of 1 ns ahead make it spin

    def time(self) -> float:
        return self._virtual.now_s


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Like asyncio.run, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(coroutine)


def elapsed_s() -> float:
    """Virtual seconds since the run began."""
    return asyncio.get_running_loop().time()
