"""The events of all nodes at their coordinator: bounded on the way in, written by a thread of their own.

In: batches of lines from the nodes, which nobody vouches for. Out: the run file (run_file.py). The loop only
counts and queues; unpacking, vetting and writing are the thread's, so a disk that is slow or hangs costs events
and nothing else. The thread is there from the first batch on.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import NamedTuple

from launcher.rendezvous.event_batch import MIB, Allowance
from launcher.rendezvous.messages import EventBatch
from launcher.run_file import NodeEvents, RunFile

_LINE_COST_BYTES = 128  # of a node's allowance: lines cost time as bytes do
_BATCH_COST_BYTES = 256  # of the queue
LAST_S = 1.0  # for what is queued when the job is over


class RunLimits(NamedTuple):
    """Bounds of what nodes can make the coordinator do."""

    queued_bytes: int = 16 * MIB
    node_burst_bytes: int = 16 * MIB
    node_bytes_s: int = 1 * MIB


class _Order(NamedTuple):
    """For the thread: this batch; without one, the node has left."""

    node: NodeEvents
    batch: EventBatch | None
    received_ns: int


class RunEvents:
    """See the module's docstring."""

    def __init__(self, file: RunFile, limits: RunLimits | None = None) -> None:
        self._file = file
        self._limits = limits or RunLimits()
        self._nodes: dict[int, tuple[NodeEvents, Allowance]] = {}
        self._queue: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()
        self._last: list[NodeEvents] = []  # told of when everything is written
        # Each counted by one thread only.
        self._put_bytes = self._taken_bytes = self._batches = 0
        self._thread: threading.Thread | None = None

    # ---- the loop's ------------------------------------------------------------------------------------------

    def joined(self, node: int, host: str) -> None:
        """A node has come; what it sends is of this host."""
        allowance = Allowance(self._limits.node_bytes_s, self._limits.node_burst_bytes, time.monotonic())
        self._nodes[node] = NodeEvents(host), allowance

    def left(self, node: int) -> None:
        """It is gone, and sends nothing more."""
        found = self._nodes.pop(node, None)
        if found is not None and self._thread is not None:
            self._queue.put(_Order(found[0], None, time.monotonic_ns()))

    def receive(self, node: int, batch: EventBatch) -> None:
        """Lines of a node; those of one that is not known are nobody's."""
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
        self._queue.put(_Order(known, batch, now_ns))

    @property
    def queued_bytes(self) -> int:
        """What waits for the disk."""
        return self._put_bytes - self._taken_bytes

    def close(self, most_s: float = LAST_S) -> str:
        """Writes what is left, within so long; a line for people when events are missing because of the disk."""
        if self._thread is None:
            return ""
        self._last = [known for known, _ in self._nodes.values()]
        self._nodes.clear()
        self._queue.put(None)
        self._thread.join(most_s)
        if self._thread.is_alive():
            why = f"the disk took nothing for {most_s:g} s"
        elif self._file.trouble:
            why = self._file.trouble
        else:
            return ""
        return f"{self._file.path} lacks events: {why}; each node's own event files have them"

    def statistics(self) -> dict[str, int]:
        """Counters for the tests; of nodes that are there."""
        dropped = sum(known.dropped for known, _ in self._nodes.values())
        return {
            "nodes": len(self._nodes),
            "batches": self._batches,
            "queued_bytes": self.queued_bytes,
            "events_dropped": dropped + self._file.dropped_by_others,
            "lines": self._file.lines,
            "bytes": self._file.bytes,
        }

    # ---- the thread's ----------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while (order := self._queue.get()) is not None:
            if order.batch is None:
                self._file.leave(order.node)
                continue
            self._file.write(order.node, order.batch, order.received_ns)
            self._taken_bytes += len(order.batch.data) + _BATCH_COST_BYTES
        for known in self._last:
            self._file.leave(known)
        self._file.close()
