"""The events of all nodes at their coordinator: limited on arrival, written by a separate thread.

In: batches of lines from the nodes, which are not trusted. Out: the run file (run_file.py). The loop only counts
and queues. The thread unpacks, validates and writes, so a disk that is slow or hangs costs only events. The thread
exists from the first batch on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from launcher.coordinator.run_file import NodeEvents, RunFile
from launcher.rendezvous.event_batch import MIB, TokenBucket
from launcher.rendezvous.messages import EventBatch

_LINE_COST_BYTES = 128  # of a node's allowance: each line costs time, too
_BATCH_COST_BYTES = 256  # of the queue
LAST_S = 1.0  # to write queued batches when the job is over


class RunLimits(NamedTuple):
    """Limits on the work that nodes can cause at the coordinator."""

    queued_bytes: int = 16 * MIB
    node_burst_bytes: int = 16 * MIB
    node_bytes_s: int = 1 * MIB


class _WriteOrder(NamedTuple):
    """An order for the thread: a batch to write, or None if the node has left."""

    node: NodeEvents
    batch: EventBatch | None
    received_ns: int


class RunEvents:
    """The events of all nodes at their coordinator."""

    def __init__(self, file: RunFile, limits: RunLimits | None = None) -> None:
        self._file = file
        self._limits = limits or RunLimits()
        self._nodes: dict[int, tuple[NodeEvents, TokenBucket]] = {}
        self._queue: queue.SimpleQueue[_WriteOrder | None] = queue.SimpleQueue()
        self._last: list[NodeEvents] = []  # their missing lines are recorded after the last write
        # Each of these counters is changed by one thread only.
        self._put_bytes = self._taken_bytes = self._batches = 0
        self._thread: threading.Thread | None = None

    # ---- called by the loop ----------------------------------------------------------------------------------

    def joined(self, node: int, host: str) -> None:
        """Add a node, whose events are of this host."""
        allowance = TokenBucket(self._limits.node_bytes_s, self._limits.node_burst_bytes, time.monotonic())
        self._nodes[node] = NodeEvents(host), allowance

    def left(self, node: int) -> None:
        """Remove a node, which sends nothing more."""
        found = self._nodes.pop(node, None)
        if found is not None and self._thread is not None:
            self._queue.put(_WriteOrder(found[0], None, time.monotonic_ns()))

    def receive(self, node: int, batch: EventBatch) -> None:
        """Queue the lines of a node; ignore those of unknown nodes."""
        if node not in self._nodes:
            return
        known, allowance = self._nodes[node]
        now_ns = time.monotonic_ns()
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_all, name="run-events", daemon=True)
            self._thread.start()
        self._batches += 1
        cost = batch.raw_bytes + batch.lines * _LINE_COST_BYTES
        size = len(batch.data) + _BATCH_COST_BYTES
        if allowance.left(now_ns / 1e9) <= 0 or self.queued_bytes + size > self._limits.queued_bytes:
            known.busy += batch.lines
            return
        allowance.take(cost)
        self._put_bytes += size
        self._queue.put(_WriteOrder(known, batch, now_ns))

    @property
    def queued_bytes(self) -> int:
        """Bytes that wait for the disk."""
        return self._put_bytes - self._taken_bytes

    def close(self, max_s: float = LAST_S) -> str:
        """Write queued batches within `max_s`. Returns: a warning if the disk has lost events, else ""."""
        if self._thread is None:
            return ""
        self._last = [known for known, _ in self._nodes.values()]
        self._nodes.clear()
        self._queue.put(None)
        self._thread.join(max_s)
        if self._thread.is_alive():
            why = f"the disk accepted no data for {max_s:g} s"
        elif self._file.trouble:
            why = self._file.trouble
        else:
            return ""
        return f"{self._file.path} lacks events: {why}; each node's own event files have them"

    def statistics(self) -> dict[str, int]:
        """Return counters for the tests; per-node ones only of present nodes."""
        dropped = sum(known.dropped for known, _ in self._nodes.values())
        return {
            "nodes": len(self._nodes),
            "batches": self._batches,
            "queued_bytes": self.queued_bytes,
            "events_dropped": dropped + self._file.dropped_by_left_nodes,
            "lines": self._file.lines,
            "bytes": self._file.bytes,
        }

    # ---- in the thread ---------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (order := self._queue.get()) is not None:
            if order.batch is None:
                self._try(self._file.leave, order.node)
                continue
            if not self._try(self._file.write, order.node, order.batch, order.received_ns):
                order.node.bad += order.batch.lines
            self._taken_bytes += len(order.batch.data) + _BATCH_COST_BYTES
        for known in self._last:
            self._try(self._file.leave, known)
        self._file.close()

    def _try(self, write: Callable[..., object], *args: object) -> bool:
        """Call a function of the file; return False after an unexpected error, which must not end the thread."""
        try:
            write(*args)
        except Exception as error:
            self._file.trouble = " ".join(f"{type(error).__name__}: {error}".split())
            return False
        return True
