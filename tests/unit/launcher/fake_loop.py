"""A loop whose time is the test's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any


class FakeLoop:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.planned: list[tuple[float, Callable[[], object]]] = []

    def time(self) -> float:
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[..., object], *args: Any) -> Any:
        entry = (self.now_s + delay_s, partial(callback, *args) if args else callback)
        self.planned.append(entry)
        return SimpleNamespace(cancel=lambda: entry in self.planned and self.planned.remove(entry))

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self.planned and min(each[0] for each in self.planned) <= end_s:
            entry = min(self.planned, key=lambda each: each[0])
            self.planned.remove(entry)
            self.now_s = entry[0]
            entry[1]()
        self.now_s = end_s
