"""Thread-safe counters of a store."""

from __future__ import annotations

import threading

NAMES = ("requests", "read_bytes", "written_bytes", "retries")


class StoreCounters:
    """Named numbers that only increase."""

    def __init__(self, *more: str) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys((*NAMES, *more), 0)

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    def to_dict(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
