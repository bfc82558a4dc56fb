"""Records which blocks a start reads, and when, for the prefetch of the next start. Thread-safe and cheap."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable

from bootseer.blocks.trace import ANY_WORKLOAD, MAX_TRACED, Trace, recording_name

CAP_S = 600.0  # for a program that never reports that it has started


class Recorder:
    """First accesses to `block_count` blocks from now on, until `finish`, for `cap_s` or `max_blocks` at most.

    `seen` has a byte for each block, not 0 for accessed ones; `is_on`: it still records. Both are for
    callers with many accesses: a block that is seen need not be recorded again.
    """

    def __init__(
        self,
        block_count: int,
        *,
        cap_s: float = CAP_S,
        max_blocks: int = MAX_TRACED,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.is_on = block_count > 0
        self.seen = bytearray(block_count)
        self._cap_s, self._max_blocks, self._now_s = cap_s, max_blocks, now_s
        self._begin_s = now_s()
        self._name = recording_name(time.time(), secrets.randbits(32))
        self._blocks: list[int] = []
        self._first_ms: list[int] = []
        self._lock = threading.Lock()

    def touch(self, first: int, last: int) -> None:
        """Record an access to blocks `first` to `last`."""
        after_s = self._now_s() - self._begin_s
        with self._lock:
            if not self.is_on:
                return
            if after_s > self._cap_s:
                self.is_on = False
                return
            for number in range(max(0, first), min(last + 1, len(self.seen))):
                if not self.seen[number]:
                    self.seen[number] = 1
                    self._blocks.append(number)
                    self._first_ms.append(int(after_s * 1000))
            if len(self._blocks) >= self._max_blocks:
                del self._blocks[self._max_blocks :], self._first_ms[self._max_blocks :]
                self.is_on = False

    def finish(self) -> None:
        """End the recording: the start is over."""
        with self._lock:
            self.is_on = False

    def trace(self, tree: str, workload: str = ANY_WORKLOAD) -> Trace | None:
        """Return the trace so far; None when it is empty."""
        with self._lock:
            if not self._blocks:
                return None
            return Trace(
                tree=tree,
                workload=workload,
                runs=1,
                blocks=list(self._blocks),
                seen=[1] * len(self._blocks),
                first_ms=list(self._first_ms),
                recordings=[self._name],
            )
