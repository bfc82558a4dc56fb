"""PURE: which lines of event files go to the coordinator, and in batches of what size; also how one is opened.

Heartbeats have a rate of their own, so that a rank that writes many of them costs neither the network nor the
events of a start. What comes in is opened within bounds that do not depend on what it says of itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from bootseer.events import BEAT_MARK
from launcher.rendezvous.codec import MOST_EVENT_LINES, MOST_EVENTS_BYTES, MOST_RAW_EVENTS_BYTES
from launcher.rendezvous.messages import EventsDropped

KIB = 1024
MIB = 1024 * KIB
MOST_LINE_BYTES = 16 * KIB  # without its end
AIM_BYTES = 256 * KIB  # of a batch, before compression
_FAST = 1  # level of zlib
# Of a node: lines of starts and failures ...
BURST_BYTES = 4 * MIB
RATE_BYTES_S = 64 * KIB
# ... and heartbeats, whose rate all nodes share.
BEATS_BURST_BYTES = 64 * KIB
BEATS_RATE_BYTES_S = 256 * KIB
LEAST_BEATS_RATE_BYTES_S = 256
# As inside.py and bootseer.events begin each line.
_START = b'{"v":'


class Allowance:
    """Bytes that may pass: some at once, then so many a second. What is taken beyond is owed."""

    __slots__ = ("_burst", "_left", "_seen_s", "rate")

    def __init__(self, rate: float, burst: float, now_s: float) -> None:
        self.rate = rate
        self._burst = burst
        self._left = burst
        self._seen_s = now_s

    def left(self, now_s: float) -> float:
        """What may pass now; at most 0 when nothing may."""
        self._left = min(self._burst, self._left + max(0.0, now_s - self._seen_s) * self.rate)
        self._seen_s = max(self._seen_s, now_s)
        return self._left

    def take(self, size: float) -> None:
        """So much has passed."""
        self._left -= size


class Drops:
    """Counts what a node does not send; one for all that may drop something."""

    __slots__ = ("long", "rate", "torn", "unread")

    def __init__(self) -> None:
        self.rate = self.long = self.unread = self.torn = 0

    def told(self) -> EventsDropped:
        """For the coordinator."""
        return EventsDropped(self.rate, self.long, self.unread, self.torn)


class Sieve:
    """Keeps a node's lines within their rates; `nodes` says how many share that of heartbeats."""

    def __init__(self, nodes: int, drops: Drops, now_s: float) -> None:
        self._drops = drops
        self._lines = Allowance(RATE_BYTES_S, BURST_BYTES, now_s)
        self._beats = Allowance(0, BEATS_BURST_BYTES, now_s)
        self.set_nodes(nodes)

    def set_nodes(self, nodes: int) -> None:
        """The world has another size."""
        self._beats.rate = max(LEAST_BEATS_RATE_BYTES_S, BEATS_RATE_BYTES_S / max(1, nodes))

    def has_room(self, now_s: float) -> bool:
        """Whether more lines may be read; if not, they wait in their files."""
        return self._lines.left(now_s) > 0

    def sift(self, lines: Sequence[bytes], now_s: float) -> list[bytes]:
        """Those that go out."""
        kept = []
        lines_bytes = beats_bytes = 0
        beats_left = self._beats.left(now_s)
        for line in lines:
            if len(line) > MOST_LINE_BYTES:
                self._drops.long += 1
            elif not line.startswith(_START):
                self._drops.torn += 1
            elif BEAT_MARK not in line:
                lines_bytes += len(line) + 1
                kept.append(line)
            elif beats_bytes + len(line) < beats_left:
                beats_bytes += len(line) + 1
                kept.append(line)
            else:
                self._drops.rate += 1
        self._lines.take(lines_bytes)
        self._beats.take(beats_bytes)
        return kept


class Packed(NamedTuple):
    """The first `lines` of some lines, as they are sent."""

    data: bytes
    raw_bytes: int
    lines: int


def pack(lines: Sequence[bytes]) -> Packed:
    """As many of the lines from the first on as one batch takes: none only if there are none."""
    import zlib

    count, raw_bytes = 0, 0
    for line in lines:
        raw_bytes += len(line) + 1
        if count == MOST_EVENT_LINES or (count and raw_bytes > AIM_BYTES):
            break
        count += 1
    while count:
        raw = b"\n".join(lines[:count]) + b"\n"
        data = zlib.compress(raw, _FAST)
        if len(data) <= MOST_EVENTS_BYTES:
            return Packed(data, len(raw), count)
        count //= 2  # a line alone always fits, even one that does not get smaller
    return Packed(b"", 0, 0)


def unpack(data: bytes, raw_bytes: int, lines: int) -> list[bytes] | None:
    """The lines of a batch; None for anything but what `pack` makes. Never more memory than a batch may take."""
    import zlib

    if not data:
        return [] if not raw_bytes and not lines else None
    if not (0 < raw_bytes <= MOST_RAW_EVENTS_BYTES and 0 < lines <= MOST_EVENT_LINES):
        return None
    inflater = zlib.decompressobj()
    try:
        raw = inflater.decompress(data, raw_bytes + 1)
    except zlib.error:
        return None
    if not inflater.eof or inflater.unused_data or len(raw) != raw_bytes:
        return None
    if not raw.endswith(b"\n") or raw.count(b"\n") != lines:
        return None
    return raw[:-1].split(b"\n")
