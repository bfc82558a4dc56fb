"""Copying of heartbeats from the ranks' stats pages to their event files, so that no rank waits for a disk.

On the event loop, once a second. In: the ranks of an attempt. Out: events as the rank would write them itself
(launcher/in_rank/bootstrap.py, make_heartbeat). Records that cannot be read or written are omitted: events never
disturb a job.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Protocol

from bootseer.events import EventWriter, Kind
from launcher.base.loop import Alarm, EventLoop
from launcher.ranks.stats_page import HeartbeatRecord, heartbeat_event, read_heartbeats

LOOK_S = 1.0  # the stats page has room for the records of some seconds


class HeartbeatRank(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def page_file(self) -> str: ...
    @property
    def events_file(self) -> str: ...


class HeartbeatCopier:
    """The heartbeats of one attempt's ranks on this node."""

    def __init__(
        self, loop: EventLoop, ranks: Iterable[HeartbeatRank], run_id: str, node: str, attempt: int
    ) -> None:
        """Args: run_id, node, attempt: as in the events of the ranks."""
        self._kept: dict[int, _RankHeartbeats] = {}
        for rank in ranks:
            try:
                fd = os.open(rank.page_file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            writer = EventWriter(rank.events_file, run_id, node, rank.rank, attempt, is_others=True)
            self._kept[rank.rank] = _RankHeartbeats(fd, writer)
        self._alarm = Alarm(loop)
        self._look()

    def rank_ended(self, rank: int) -> None:
        """Write the rank's last heartbeats, before readers of its events learn of its end."""
        kept = self._kept.pop(rank, None)
        if kept is not None:
            kept.bring()
            kept.close()

    def stop(self) -> None:
        """Write all and stop, as the attempt is over."""
        self._alarm.cancel()
        for rank in list(self._kept):
            self.rank_ended(rank)

    def bring(self) -> None:
        """Write all heartbeats that are in the stats pages now."""
        for kept in self._kept.values():
            kept.bring()

    def _look(self) -> None:
        self.bring()
        if self._kept:
            self._alarm.set(LOOK_S, self._look)


class _RankHeartbeats:
    def __init__(self, fd: int, writer: EventWriter) -> None:
        self._fd = fd
        self._writer = writer
        self._number = 0  # of the last record that was written

    def bring(self) -> None:
        for note in read_heartbeats(self._fd, self._number):
            self._number = note.number
            self._write(note)

    def close(self) -> None:
        os.close(self._fd)
        self._writer.close()

    def _write(self, note: HeartbeatRecord) -> None:
        found = heartbeat_event(note)
        if found is None:
            return  # not a valid record: the rank can write anything
        value, attrs = found
        at_ns = min(note.mono_ns, time.monotonic_ns())
        self._writer.write(None, Kind.SCALAR, "heartbeat", mono_ns=at_ns, attrs=attrs, value=value)
