"""Brings the numbers of heartbeats from the ranks' pages into their event files, so that no rank waits for a disk.

On the event loop, once a second. In: the ranks of an attempt. Out: events as the rank would write them itself
(launcher/inside.py, make_heartbeat). What cannot be read or written is left out: events disturb nothing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Protocol

from bootseer.events import EventWriter, Kind
from launcher.loop import Alarm, EventLoop
from launcher.supervise.page import Note, note_event, read_notes

LOOK_S = 1.0  # the page has room for the notes of some seconds


class Beating(Protocol):
    """A rank of this node."""

    @property
    def rank(self) -> int: ...
    @property
    def page_file(self) -> str: ...
    @property
    def events_file(self) -> str: ...


class NodeBeats:
    """Of one attempt."""

    def __init__(self, loop: EventLoop, ranks: Iterable[Beating], run_id: str, node: str, attempt: int) -> None:
        """Args: run_id, node, attempt: as the events of the ranks have them."""
        self._kept: dict[int, _Kept] = {}
        for rank in ranks:
            try:
                fd = os.open(rank.page_file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            writer = EventWriter(rank.events_file, run_id, node, rank.rank, attempt, is_others=True)
            self._kept[rank.rank] = _Kept(fd, writer)
        self._alarm = Alarm(loop)
        self._look()

    def rank_ended(self, rank: int) -> None:
        """Its last ones come before whoever reads its events is told of its end."""
        kept = self._kept.pop(rank, None)
        if kept is not None:
            kept.bring()
            kept.close()

    def stop(self) -> None:
        """The attempt is over."""
        self._alarm.cancel()
        for rank in list(self._kept):
            self.rank_ended(rank)

    def bring(self) -> None:
        """What there is now."""
        for kept in self._kept.values():
            kept.bring()

    def _look(self) -> None:
        self.bring()
        if self._kept:
            self._alarm.set(LOOK_S, self._look)


class _Kept:
    """One rank's."""

    def __init__(self, fd: int, writer: EventWriter) -> None:
        self._fd = fd
        self._writer = writer
        self._number = 0  # of the last note that was brought

    def bring(self) -> None:
        for note in read_notes(self._fd, self._number):
            self._number = note.number
            self._write(note)

    def close(self) -> None:
        os.close(self._fd)
        self._writer.close()

    def _write(self, note: Note) -> None:
        found = note_event(note)
        if found is None:
            return  # not ours: the rank can write what it likes
        value, attrs = found
        at_ns = min(note.mono_ns, time.monotonic_ns())
        self._writer.write(None, Kind.SCALAR, "heartbeat", mono_ns=at_ns, attrs=attrs, value=value)
