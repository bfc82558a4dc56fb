"""The run file of a job: validated events of all nodes appended to one file, and counts of missing ones.

In: batches and their nodes. Out: lines appended with one write a batch, up to a size limit. Separate from
run_events.py because this can block and runs in a thread: the loop only reads counters of it.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

from bootseer.events import EVENTS_DROPPED, Event, Kind
from launcher.rendezvous.event_batch import MIB, unpack
from launcher.rendezvous.event_lines import LineSender, validate_line, write_event
from launcher.rendezvous.messages import EventBatch, EventsDropped

# How far a node's estimate of the coordinator's clock may lie in the future before it is not trusted.
_SLACK_NS = 1_000_000_000


class FileLimits(NamedTuple):
    """Limits of the file, and how often a node's missing lines are recorded."""

    file_bytes: int = 512 * MIB
    beats_bytes: int = 128 * MIB  # of these, heartbeats
    tell_s: float = 10.0


class NodeEvents:
    """Counts of a node's missing events; the loop counts `busy`, the thread all others."""

    __slots__ = ("at_node", "bad", "busy", "disk", "full", "host", "told", "told_ns")

    def __init__(self, host: str) -> None:
        self.host = host
        self.at_node = EventsDropped(0, 0, 0, 0)  # as the node reports
        self.busy = self.bad = self.full = self.disk = 0
        self.told = 0
        self.told_ns = -(2**62)

    def reasons(self) -> dict[str, int]:
        """Return how many of the node's lines are missing, by reason."""
        here = {"busy": self.busy, "bad": self.bad, "full": self.full, "disk": self.disk}
        return {name: count for name, count in {**self.at_node._asdict(), **here}.items() if count}

    @property
    def dropped(self) -> int:
        """How many of the node's lines are missing."""
        return sum(self.reasons().values())


class RunFile:
    """The run file of a job, opened at the first line. `trouble`: why the disk accepted no more data."""

    def __init__(self, path: str, run_id: str, limits: FileLimits | None = None) -> None:
        self.path = path
        self.trouble = ""
        self.lines = self.bytes = 0  # written
        self.dropped_by_left_nodes = 0  # by nodes that have left
        self._run_id = run_id
        self._limits = limits or FileLimits()
        self._heartbeats_bytes = 0
        self._fd = -1
        self._is_torn = False  # the last line was cut off by a full disk

    def write(self, node: NodeEvents, batch: EventBatch, received_ns: int) -> None:
        error_ns = batch.error_ns
        if batch.job_ns - error_ns > received_ns + _SLACK_NS:
            error_ns = 2**62  # a time in the future: the node's clock offset is unknown
        source = LineSender(self._run_id, node.host, batch.local_ns, batch.job_ns, error_ns)
        node.at_node = batch.dropped
        lines = unpack(batch.data, batch.raw_bytes, batch.lines)
        if lines is None:
            node.bad += max(1, batch.lines)
            lines = []
        kept: list[bytes] = []
        size = 0
        for line in lines:
            vetted = validate_line(line, source)
            if vetted is None:
                node.bad += 1
            elif not self._has_room(size, len(vetted.line), vetted.is_beat):
                node.full += 1
            else:
                self._heartbeats_bytes += len(vetted.line) if vetted.is_beat else 0
                size += len(vetted.line)
                kept.append(vetted.line)
        if kept:
            node.disk += len(kept) - self._append(b"".join(kept))
        if received_ns - node.told_ns >= self._limits.tell_s * 1e9:
            self._tell(node)
            node.told_ns = received_ns

    def leave(self, node: NodeEvents) -> None:
        """Record the missing lines of a node that sends nothing more."""
        self._tell(node, is_last=True)
        self.dropped_by_left_nodes += node.dropped

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _has_room(self, waiting: int, size: int = 0, is_beat: bool = False) -> bool:
        if is_beat and self._heartbeats_bytes + size > self._limits.beats_bytes:
            return False
        return self.bytes + waiting + size <= self._limits.file_bytes

    def _tell(self, node: NodeEvents, is_last: bool = False) -> None:
        """Record how many lines of a node are missing, if the count has changed."""
        dropped = node.dropped
        if dropped == node.told:
            return
        # A full file accepts only the last record: one line a node.
        if not is_last and not self._has_room(0):
            return
        now_ns = time.monotonic_ns()
        event = Event(
            time.time_ns(),
            now_ns,
            self._run_id,
            node.host,
            None,
            None,
            None,
            Kind.SCALAR.value,
            EVENTS_DROPPED,
            value=dropped,
            attrs=node.reasons(),
            job_ns=now_ns,
            job_error_ns=0,
        )
        if self._append(write_event(event)):
            node.told = dropped

    def _append(self, data: bytes) -> int:
        """Write lines with one call. Returns: how many of them are in the file."""
        try:
            if self._fd < 0:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
                self._fd = os.open(self.path, flags, 0o644)
                self._is_torn = os.fstat(self._fd).st_size > 0  # an older run may have ended within a line
            if self._is_torn:
                self._is_torn = os.write(self._fd, b"\n") < 1
            written = os.write(self._fd, data)
        except OSError as error:
            self.trouble = error.strerror or "unknown error"
            return 0
        self._is_torn = written < len(data)
        if self._is_torn:
            self.trouble = "the disk is full"
        lines = data.count(b"\n", 0, written)
        self.lines += lines
        self.bytes += written
        return lines
